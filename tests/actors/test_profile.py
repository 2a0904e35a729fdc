"""An engine's profile: stages that add up to the wall clock, each where its time is spent."""

from __future__ import annotations

import threading
import time
from dataclasses import asdict
from functools import partial

import numpy as np
import pytest

from actors.fake_engine import Script, ScriptedLlm
from actors.feeder import Feeder, read_planned
from actors.profile import MAIN_STAGES, EngineProfile, Stage, StageClock, WorkerTimes, engine_profile
from actors.protocol import EngineSpec, Lease, Receipt
from actors.selection import Selection
from actors.worker.pass_clock import PassClock
from tests.actors.test_feeder import LOCATIONS
from tests.harness import make_run


class Feeding:
    """A feeder over the scripted engine in a thread of its own."""

    def __init__(self, run, script=None, **changes):
        spec = EngineSpec(
            run_path=str(run.path),
            model="",
            locations=("residual.0", "residual.1"),
            layout=run.layout,
            selection=Selection(),
            sampling={},
            **changes,
        )
        self.llm = ScriptedLlm(spec, script or Script())
        self.feeder = Feeder(self.llm, spec, partial(read_planned, run.plan, unit_rows=run.layout.unit_rows))
        self._thread = threading.Thread(target=self.feeder.run, daemon=True)

    def __enter__(self):
        self._begun_s = time.perf_counter()
        self._thread.start()
        return self

    def __exit__(self, *error):
        self.feeder.stop()
        self._thread.join(10)
        self.wall_s = time.perf_counter() - self._begun_s
        self.llm.close()

    def slow_down(self, method, wait):
        """Call `wait` before each call of a writer's method."""
        open_writer = self.llm._sink._open_writer

        def open_slow(unit, attempt):
            writer = open_writer(unit, attempt)
            original = getattr(writer, method)

            def slow(*arguments, **named):
                wait()
                return original(*arguments, **named)

            setattr(writer, method, slow)
            return writer

        self.llm._sink._open_writer = open_slow


@pytest.fixture
def run(tmp_path):
    random = np.random.default_rng(0)
    prompts = [random.integers(0, 1000, int(n)).tolist() for n in random.integers(1, 200, 40)]
    return make_run(tmp_path / "run", prompts, LOCATIONS, n_units=4)


def test_the_stages_add_up_to_the_wall_clock_and_each_has_its_time(run):
    with Feeding(run, Script(step_s=0.005)) as feeding:
        feeding.slow_down("seal", lambda: time.sleep(0.05))
        for unit in range(4):
            result = feeding.feeder.submit(Lease(unit=unit, attempt=1)).result(30)
            assert isinstance(result, Receipt), result.traceback
        time.sleep(0.05)
    profile = feeding.feeder.stats.profile
    assert profile.wall_s == pytest.approx(feeding.wall_s, rel=0.02, abs=0.02)
    for stage in ("plan", "feed", "forward", "settle", "sealing", "idle", "write", "seal"):
        assert profile.seconds(stage) > 0, stage
    assert profile.forward_s >= 0.005 * profile.n_steps
    assert profile.seal_s >= 4 * 0.05
    assert profile.gated_s == profile.start_s == profile.copy_s == 0
    assert profile.n_step_tokens == sum(len(invoke["token_ids"]) for u in range(4) for invoke in _plan(run, u))
    assert 0 < profile.fullness <= 1
    stopped = feeding.feeder.stats.profile
    time.sleep(0.02)
    assert feeding.feeder.stats.profile == stopped, "a stopped engine's clock stands"


def _plan(run, unit):
    return run.plan.read_unit(unit).to_pylist()


def test_a_stalled_disk_shows_as_gated_and_in_the_writers(run):
    step_bytes = ScriptedLlm.max_step_tokens * 2 * 64 * 4
    with Feeding(run, ring_bytes=3 * step_bytes, writer_threads=1) as feeding:
        feeding.slow_down("write", lambda: time.sleep(0.005))
        futures = [feeding.feeder.submit(Lease(unit=unit, attempt=1)) for unit in range(4)]
        for future in futures:
            future.result(60)
        profile = feeding.feeder.stats.profile
    assert profile.gated_s > 0.5 * profile.wall_s
    assert profile.write_s > 0.7 * profile.wall_s, "the one writer thread was busy nearly all the time"
    assert profile.gated_s == pytest.approx(feeding.feeder.stats.gated_s)


def test_a_clock_gives_all_time_to_the_stage_it_is_in():
    now = [0.0]
    clock = StageClock(lambda: now[0])
    stages: list[tuple[float, Stage]] = [(5, "plan"), (1, "forward"), (2, "gated"), (4, "forward")]
    for seconds, stage in stages:
        now[0] += seconds
        clock.enter(stage)
    now[0] += 8
    assert clock.times() == {"plan": 1, "forward": 2 + 8, "gated": 4}
    clock.enter(None)
    now[0] += 16
    assert clock.times() == {"plan": 1, "forward": 2 + 8, "gated": 4}


def test_profiles_of_engines_add_up_and_survive_json():
    one = engine_profile(
        {"forward": 3.0, "idle": 1.0},
        [WorkerTimes(snapshot_s=1.0, write_s=2.0, n_steps=2, n_step_tokens=100), WorkerTimes(snapshot_s=9, write_s=4)],
        step_room=64,
        writers=4,
    )
    assert (one.forward_s, one.snapshot_s, one.write_s, one.writers, one.sealers) == (2, 1, 6, 8, 4)
    assert one.wall_s == 4
    assert one.fullness == 100 / 128
    both = one + one
    assert both.wall_s == 8
    assert both.write_s == 12
    assert both.writers == 8, "of one engine"
    assert both - one == one
    assert EngineProfile.from_json(one.to_json() | {"of_a_later_version": 1}) == one
    assert {f"{stage}_s" for stage in MAIN_STAGES} <= set(asdict(one))


def test_a_snapshot_longer_than_the_steps_takes_no_more_than_them():
    profile = engine_profile({"forward": 1.0}, [WorkerTimes(snapshot_s=1.5)], step_room=1, writers=1)
    assert (profile.forward_s, profile.snapshot_s, profile.wall_s) == (0, 1, 1)


class Stream:
    """A device that reaches its events when told to; an event is recorded at the device's own time in ms."""

    def __init__(self):
        self.made: list[Event] = []
        self.reached = 0

    def event(self):
        event = Event(self, len(self.made))
        self.made.append(event)
        return event


class Event:
    def __init__(self, stream, number):
        self.stream, self.number = stream, number

    def record(self):
        self.at_ms = 10 * self.number**2

    def query(self):
        return self.number < self.stream.reached

    def elapsed_time(self, later):
        assert later.query(), "read before the device was there"
        return later.at_ms - self.at_ms


def test_a_pass_clock_reads_only_what_the_device_has_finished():
    stream = Stream()
    clock = PassClock(stream.event)
    clock.end_forward(), clock.end_snapshot()  # nothing began
    for _ in range(2):
        clock.begin(), clock.end_forward(), clock.end_snapshot()
        clock.end_forward(), clock.end_snapshot()
    clock.begin()  # a pass that failed
    clock.begin(), clock.end_forward(), clock.end_snapshot()
    assert clock.seconds() == (0, 0)
    stream.reached = 5  # in the midst of the second pass
    assert clock.seconds() == pytest.approx((0.010, 0.030))
    stream.reached = 10
    assert clock.seconds() == pytest.approx((0.010 + 0.070 + 0.150, 0.030 + 0.090 + 0.170))
    clock.reset()
    assert clock.seconds() == (0, 0)
