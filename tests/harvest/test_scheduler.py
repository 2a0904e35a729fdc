"""The scheduler against a plain model: nothing lost, nothing leased twice, and it stops when it must."""

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from harvest.scheduler import Scheduler


def make(pending, **changes):
    counters: dict[int, itertools.count] = {}
    arguments = {
        "number_attempt": lambda unit: next(counters.setdefault(unit, itertools.count())),
        "max_attempts": 3,
        "max_engine_losses": 2,
        "units_in_flight": 2,
    }
    return Scheduler(pending, **{**arguments, **changes})


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(n_units=st.integers(0, 12))
    def begin(self, n_units):
        self.scheduler = make(range(n_units), max_attempts=10**6, max_engine_losses=10**6)
        self.pending = set(range(n_units))
        self.live: dict = {}
        self.dead: list = []
        self.committed: set[int] = set()
        self.draining = False

    @rule(engine=st.sampled_from("abc"))
    def lease(self, engine):
        held = sum(holder == engine for holder in self.live.values())
        lease = self.scheduler.lease(engine)
        if self.draining or held >= 2 or not self.pending:
            assert lease is None
            return
        assert lease.unit in self.pending
        assert lease not in self.live
        assert lease not in self.dead
        self.pending.remove(lease.unit)
        self.live[lease] = engine

    @rule(data=st.data())
    def commit(self, data):
        if self.live:
            lease = data.draw(st.sampled_from(sorted(self.live, key=str)))
            assert self.scheduler.is_live(lease)
            self.scheduler.commit(lease)
            del self.live[lease]
            self.dead.append(lease)
            self.committed.add(lease.unit)

    @rule(data=st.data())
    def late_results_are_known(self, data):
        if self.dead:
            lease = data.draw(st.sampled_from(self.dead))
            assert not self.scheduler.is_live(lease)
            self.scheduler.fail(lease, "late")

    @rule(data=st.data())
    def fail(self, data):
        if self.live:
            lease = data.draw(st.sampled_from(sorted(self.live, key=str)))
            self.scheduler.fail(lease, "reason")
            del self.live[lease]
            self.dead.append(lease)
            self.pending.add(lease.unit)

    @rule(engine=st.sampled_from("abc"))
    def lose(self, engine):
        lost = self.scheduler.lose_engine(engine, "reason")
        assert sorted(lost, key=str) == sorted((x for x, holder in self.live.items() if holder == engine), key=str)
        for lease in lost:
            del self.live[lease]
            self.dead.append(lease)
            self.pending.add(lease.unit)

    @rule()
    def drain(self):
        self.scheduler.drain()
        self.draining = True

    @invariant()
    def nothing_is_lost(self):
        if hasattr(self, "scheduler"):
            leased = [lease.unit for lease in self.live]
            assert len(set(leased)) == len(leased)
            assert not self.committed & (self.pending | set(leased))
            assert self.scheduler.n_pending == len(self.pending)
            held = {(lease, engine) for engine, leases in self.scheduler.leases.items() for lease in leases}
            assert held == set(self.live.items())
            assert all(self.scheduler.leases.values())
            assert self.scheduler.finished == (not self.pending and not self.live)
            assert self.scheduler.n_committed == len(self.committed)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=100, deadline=None)


def test_a_unit_that_keeps_failing_stops_the_run():
    scheduler = make([4])
    for _ in range(3):
        scheduler.fail(scheduler.lease("a"), "no space")
    assert "unit 4 failed 3 times" in str(scheduler.stop)
    assert "no space" in str(scheduler.stop)
    assert scheduler.lease("a") is None
    assert scheduler.idle
    assert not scheduler.finished


def test_engine_deaths_without_a_commit_stop_the_run():
    scheduler = make(range(10), max_attempts=100)
    for _ in range(2):
        scheduler.lose_engine("a", "out of memory")
    scheduler.commit(scheduler.lease("a"))
    for _ in range(2):
        scheduler.lose_engine("a", "out of memory")
    assert not scheduler.stop
    scheduler.lose_engine("a", "out of memory")
    assert "3 engines died" in str(scheduler.stop)


@pytest.mark.parametrize("held", [1, 3])
def test_an_engine_holds_so_many_units_and_no_more(held):
    scheduler = make(range(10), units_in_flight=held)
    leases = [scheduler.lease("a") for _ in range(held + 1)]
    assert leases[-1] is None
    assert None not in leases[:-1]
