"""Driver: the loop between scheduler and pool. Thin: decisions are the scheduler's, engines the pool's, files the
store's.

Rows never come here. A receipt is published (files renamed, ledger line appended) before the next is looked at, and
only then counts as progress.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from actors.profile import EngineProfile
from actors.protocol import EngineSpec, EngineStats, Lease, Receipt, UnitFailure
from harvest.commits import suspicious_rows
from harvest.config import RunConfig
from harvest.errors import RunError
from harvest.events import EventLog
from harvest.pool import EngineAnswered, EngineLost, EnginePool, EngineReady, PoolEvent, UnitEnded
from harvest.run_profile import RunProfile
from harvest.scheduler import Scheduler
from harvest.stalls import StallWatch
from storage.commit import Committer
from storage.unit_writer import UnitReceipt

TICK_S = 0.5
# After SIGTERM: how long units in flight may take to finish and commit.
DRAIN_S = 120.0
# How long the last counters of a profiled run are waited for.
FINAL_STATS_S = 5.0


class Driver:
    """Runs the units that are not committed yet.

    Args:
        config: of the run.
        spec: what engines are made from.
        committer: holds the run's lock.
        events: the run's event stream.
    """

    def __init__(self, *, config: RunConfig, spec: EngineSpec, committer: Committer, events: EventLog) -> None:
        self._committer = committer
        self._events = events
        self._spec = spec
        self._config = config
        committed = committer.committed
        self._scheduler = Scheduler(
            [unit for unit in range(spec.layout.n_units) if unit not in committed],
            number_attempt=committer.next_attempt,
            max_attempts=config.limits.attempts,
            max_engine_losses=config.limits.engine_restarts,
            units_in_flight=config.engine.units_in_flight,
        )
        stall_s = config.limits.stall_s
        self._stalls = StallWatch(None if stall_s == "never" else stall_s)
        self._asked_s = 0.0
        self._spawned_s: dict[str, float] = {}
        self._start_s: dict[str, float] = {}
        self._commit_s: dict[str, float] = {}
        self._stats: dict[str, EngineStats] = {}

    def drive(self) -> bool:
        """Run until all units are committed (True), a signal has drained the run (False), or it cannot go on.

        Raises:
            RunError: the run stopped; committed units stay.
        """
        if self._scheduler.finished:
            return True
        pool = EnginePool(self._spec, count=self._config.engine.count, cpus=self._config.engine.cpus)
        self._tell_of_room(pool.room)
        drained_s: float | None = None
        try:
            with _signals() as asked_to_stop:
                self._fill(pool)
                while not self._scheduler.idle:
                    if asked_to_stop.is_set() and drained_s is None:
                        drained_s = time.monotonic()
                        self._scheduler.drain()
                        self._events.emit("drain", limit_s=DRAIN_S)
                    if drained_s is not None and time.monotonic() - drained_s > DRAIN_S:
                        break
                    self._turn(pool)
        finally:
            if self._spec.profile:
                self._stats |= pool.final_stats(FINAL_STATS_S)
            pool.close()
        if self._scheduler.stop is not None:
            self._events.emit("stop", reason=self._scheduler.stop.reason)
            raise RunError(
                f"{self._scheduler.stop.reason}. {len(self._committer.committed)} of {self._spec.layout.n_units} units "
                "are committed; the same command resumes the run"
            )
        return self._scheduler.finished

    @property
    def profile(self) -> RunProfile:
        """Where the time of the engines went, those included that died (up to what they last told)."""
        engines = {}
        for name, spawned_s in self._spawned_s.items():
            stats = self._stats.get(name)
            engines[name] = replace(
                stats.profile if stats is not None else EngineProfile(),
                start_s=self._start_s.get(name, time.monotonic() - spawned_s),
                commit_s=self._commit_s.get(name, 0.0),
            )
        return RunProfile(engines=engines)

    def _tell_of_room(self, room: int) -> None:
        """Ray lets an actor for which no node has room wait for ever, and says nothing."""
        engine, tp_size = self._config.engine, self._spec.tensor_parallel_size
        if not room:
            raise RunError(
                f"no node of the Ray cluster has room for an engine: engine.tensor_parallel_size = {tp_size} (GPUs, "
                f"where the cluster has any) and engine.cpus = {engine.cpus:g}. Lower them, or add such a node"
            )
        if room < engine.count:
            self._events.emit("few_engines", room=room, count=engine.count)

    def _fill(self, pool: EnginePool) -> None:
        for name in pool.fill():
            self._spawned_s[name] = time.monotonic()
            self._events.emit("engine_spawned", engine=name)

    def _turn(self, pool: EnginePool) -> None:
        for engine in pool.ready:
            while (lease := self._scheduler.lease(engine)) is not None:
                pool.submit(engine, lease)
                self._events.emit("lease", engine=engine, unit=lease.unit, attempt=lease.attempt)
        if time.monotonic() - self._asked_s >= 2 * TICK_S:
            self._asked_s = time.monotonic()
            stats = pool.ask_stats()
            self._stats |= stats
            self._report_progress(stats)
        self._settle(pool.wait(TICK_S), pool)
        if stalls := self._stalls.look(time.monotonic(), self._scheduler.leases):
            for lost in pool.give_up({stall.engine: stall.reason for stall in stalls}):
                self._lose(lost, pool)

    def _settle(self, happened: list[PoolEvent], pool: EnginePool) -> None:
        receipts: list[tuple[str, Receipt]] = []
        for event in happened:
            match event:
                case EngineReady(engine=engine, stats=stats):
                    self._start_s[engine] = time.monotonic() - self._spawned_s[engine]
                    self._events.emit("engine_ready", engine=engine, pid=stats.pid, compute_dtype=stats.compute_dtype)
                case EngineAnswered(engine=engine, stats=stats):
                    self._stalls.hear(engine, stats)
                case EngineLost():
                    self._lose(event, pool)
                case UnitEnded(engine=engine, result=Receipt() as receipt):
                    receipts.append((engine, receipt))
                case UnitEnded(engine=engine, lease=lease, result=UnitFailure() as failure):
                    self._fail(engine, lease, f"{failure.kind}: {failure.message}", failure.traceback)
        self._publish(receipts)

    def _publish(self, receipts: list[tuple[str, Receipt]]) -> None:
        live = [(engine, receipt) for engine, receipt in receipts if self._scheduler.is_live(receipt.lease)]
        staged: list[UnitReceipt] = [receipt.storage for _, receipt in live if receipt.storage is not None]
        begun_s = time.monotonic()
        refused = self._committer.publish(staged).refused if staged else {}
        for engine, _ in live:
            self._commit_s[engine] = self._commit_s.get(engine, 0.0) + (time.monotonic() - begun_s) / len(live)
        for engine, receipt in live:
            lease = receipt.lease
            reason = refused.get((lease.unit, lease.attempt))
            if reason is not None:
                self._fail(engine, lease, f"refused: {reason}", "")
                continue
            self._scheduler.commit(lease)
            self._events.emit(
                "commit",
                engine=engine,
                unit=lease.unit,
                attempt=lease.attempt,
                n_invokes=receipt.n_invokes,
                n_prompt_tokens=receipt.n_prompt_tokens,
                n_generated_tokens=receipt.n_generated_tokens,
                n_rows=receipt.n_rows,
                stored_bytes=receipt.stored_bytes,
                engine_s=round(receipt.engine_s, 3),
                seal_s=round(receipt.seal_s, 3),
                suspicious=suspicious_rows(receipt.storage),
            )

    def _fail(self, engine: str, lease: Lease, error: str, traceback: str) -> None:
        self._scheduler.fail(lease, error)
        self._events.emit(
            "unit_failed", engine=engine, unit=lease.unit, attempt=lease.attempt, error=error, traceback=traceback
        )

    def _lose(self, lost: EngineLost, pool: EnginePool) -> None:
        leases = self._scheduler.lose_engine(lost.engine, lost.reason)
        self._events.emit(
            "engine_lost",
            engine=lost.engine,
            reason=lost.reason,
            stalled=lost.stalled,
            units=[lease.unit for lease in leases],
        )
        self._start_s.setdefault(lost.engine, time.monotonic() - self._spawned_s[lost.engine])
        if self._scheduler.stop is None:
            self._fill(pool)

    def _report_progress(self, stats: dict[str, EngineStats]) -> None:
        if stats:
            self._events.emit(
                "progress",
                n_tokens=sum(each.n_tokens for each in stats.values()),
                n_rows=sum(each.n_rows for each in stats.values()),
                written_bytes=sum(each.written_bytes for each in stats.values()),
                pending_bytes=sum(each.pending_bytes for each in stats.values()),
                engines=len(stats),
            )


@contextmanager
def _signals() -> Iterator[threading.Event]:
    """Set an event on SIGTERM or SIGINT; a second signal acts as usual. Outside the main thread nothing is caught."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    previous: dict[signal.Signals, Any] = {}

    def ask(number: int, frame: Any) -> None:
        asked.set()
        for each, handler in previous.items():
            signal.signal(each, handler)

    for number in (signal.SIGTERM, signal.SIGINT):
        previous[number] = signal.signal(number, ask)
    try:
        yield asked
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
