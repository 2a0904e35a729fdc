"""The watch for stalled engines: against a plain model of time, and what it says of real stages."""

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from actors.profile import EngineProfile
from actors.protocol import EngineStats, Lease
from harvest.stalls import LOOKS, StallWatch

LIMIT_S = 100.0
COUNTERS = ("n_tokens", "n_rows", "written_bytes", "n_steps", "n_recomputed")
PROFILE_COUNTERS = ("n_steps", "n_step_tokens", "n_sealed_files")


class StallMachine(RuleBasedStateMachine):
    """Engines that work, hang, answer or do not, under a driver that looks at them when it can."""

    @initialize()
    def begin(self):
        self.now_s = 1000.0
        self.watch = StallWatch(LIMIT_S)
        self.leases: dict[str, frozenset[Lease]] = {}
        self.tokens = dict.fromkeys("ab", 0)
        self.told = dict.fromkeys("ab", -1)
        self.progress_s: dict[str, float] = {}
        self.credit_s: dict[str, float] = {}
        self.found_progress: set[str] = set()
        self.looked_s: float | None = None
        self.units = 0

    @rule(engine=st.sampled_from("ab"))
    def work(self, engine):
        self.tokens[engine] += 1

    @rule(engine=st.sampled_from("ab"))
    def answer(self, engine):
        self.watch.hear(engine, EngineStats(n_tokens=self.tokens[engine]))
        if self.told[engine] != self.tokens[engine]:
            self.told[engine] = self.tokens[engine]
            self.found_progress.add(engine)
            self.progress_s[engine] = self.now_s

    @rule(engine=st.sampled_from("ab"), n=st.integers(0, 2))
    def lease(self, engine, n):
        self.units += n
        held = frozenset(Lease(unit=self.units - each, attempt=0) for each in range(n))
        self.leases.pop(engine, None)
        if held:
            self.leases[engine] = held
            self.found_progress.add(engine)
        self.progress_s[engine] = self.now_s

    @rule(passed_s=st.one_of(st.floats(0, LIMIT_S / LOOKS), st.floats(0, 50 * LIMIT_S)))
    def wait(self, passed_s):
        self.now_s += passed_s

    @precondition(lambda self: self.leases)
    @rule(turns=st.integers(1, 2 * LOOKS))
    def look_again_and_again(self, turns):
        for _ in range(turns):
            self.now_s += LIMIT_S / LOOKS
            self.look()

    @rule()
    def look(self):
        passed_s = 0.0 if self.looked_s is None else min(self.now_s - self.looked_s, LIMIT_S / LOOKS)
        self.looked_s = self.now_s
        stalled = {stall.engine: stall for stall in self.watch.look(self.now_s, self.leases)}
        for engine in "ab":
            if engine not in self.leases or engine in self.found_progress:
                self.credit_s[engine] = 0.0
            else:
                self.credit_s[engine] += passed_s
            quiet_s = self.credit_s[engine]
            if math.isclose(quiet_s, LIMIT_S, abs_tol=1e-6):
                continue
            assert (engine in stalled) == (quiet_s > LIMIT_S)
        for engine, stall in stalled.items():
            assert engine in self.leases
            assert stall.quiet_s <= self.now_s - self.progress_s[engine] + 1e-6, "never longer than it was"
            assert stall.unanswered_s <= stall.quiet_s
        self.found_progress.clear()
        for engine in stalled:
            del self.leases[engine]  # as the scheduler does, and the engine is gone
            self.told[engine] = -1
        for engine in {*"ab"} - self.leases.keys():
            self.told[engine] = -1  # idle engines are not remembered


TestStallMachine = StallMachine.TestCase
TestStallMachine.settings = settings(max_examples=100, deadline=None)


def held(*units):
    return frozenset(Lease(unit=unit, attempt=0) for unit in units)


def look_until_stalled(watch, stats_at, leases=None, *, limit_s=LIMIT_S, turns=1000):
    """The stall of engine "a", looked at each second while `stats_at(second)` answers (None: no answer), or None."""
    for second in range(turns):
        if (stats := stats_at(second)) is not None:
            watch.hear("a", stats)
        if stalls := watch.look(float(second), leases or {"a": held(1)}):
            assert len(stalls) == 1
            assert second >= limit_s
            return stalls[0]
    return None


@pytest.mark.parametrize("counter", COUNTERS)
def test_any_counter_that_moves_is_progress(counter):
    assert look_until_stalled(StallWatch(LIMIT_S), lambda second: EngineStats(**{counter: second // 90})) is None


@pytest.mark.parametrize("counter", PROFILE_COUNTERS)
def test_steps_without_a_row_and_sealed_files_are_progress(counter):
    def stats(second):
        return EngineStats(profile=EngineProfile(**{counter: second // 90}))

    assert look_until_stalled(StallWatch(LIMIT_S), stats) is None


def test_time_and_bytes_that_wait_are_no_progress():
    def stats(second):
        return EngineStats(pending_bytes=second, gated_s=second, profile=EngineProfile(gated_s=second))

    stall = look_until_stalled(StallWatch(LIMIT_S), stats)
    assert stall is not None
    assert stall.reason.startswith("no progress for 100 s (limits.stall_s = 100), its thread was in the stage gated: ")
    assert "the disk takes none" in stall.reason


@pytest.mark.parametrize(
    ("stage", "words"),
    [("forward", "hung kernel"), ("sealing", "the disk"), ("plan", "plan"), ("settle", "rank"), ("idle", "units")],
)
def test_the_stage_is_that_of_most_of_the_time_without_progress(stage, words):
    def stats(second):
        # Long in another stage before progress ended, and a little now and then.
        spent = {"feed_s": 5000.0 + second / 100, f"{stage}_s": max(0, second - 50)}
        return EngineStats(n_tokens=min(second, 50), profile=EngineProfile(**spent))

    stall = look_until_stalled(StallWatch(LIMIT_S), stats)
    assert stall is not None
    assert stall.stage == stage
    assert words in stall.reason


def test_an_engine_that_does_not_answer_is_said_to_be_stopped():
    stall = look_until_stalled(StallWatch(LIMIT_S), lambda second: EngineStats(n_tokens=second) if second < 7 else None)
    assert stall is not None
    assert stall.unanswered_s == stall.quiet_s
    assert "no answer for 100 s: its process is stopped or stuck, or its node cut off" in stall.reason


def test_an_engine_that_never_answered_and_one_that_told_too_little():
    assert look_until_stalled(StallWatch(LIMIT_S), lambda second: None).unanswered_s == LIMIT_S
    stall = look_until_stalled(StallWatch(LIMIT_S), lambda second: EngineStats(n_tokens=1))
    assert stall.reason == "no progress for 100 s (limits.stall_s = 100)"


def test_leases_that_end_are_progress_and_engines_without_any_are_left_alone():
    watch = StallWatch(LIMIT_S)
    for second in range(5000):
        leases = {"a": held(second // 90, second // 90 + 1)} if second < 1000 or second > 4950 else {}
        watch.hear("a", EngineStats())
        assert not watch.look(float(second), leases)


def test_a_pause_of_the_driver_is_no_stall():
    watch = StallWatch(LIMIT_S)
    for pause in range(LOOKS):
        watch.hear("a", EngineStats())
        assert not watch.look(10_000.0 * pause, {"a": held(1)})
    # What was told while the driver paused is heard after it.
    watch.hear("a", EngineStats(n_tokens=1))
    assert not watch.look(10_000.0 * LOOKS, {"a": held(1)})


def test_a_stall_is_told_once_and_never_without_a_limit():
    watch = StallWatch(LIMIT_S)
    assert look_until_stalled(watch, lambda second: None)
    assert not watch.look(1e6, {})
    assert look_until_stalled(StallWatch(None), lambda second: None) is None
