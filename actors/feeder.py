"""Feeder: the engine's loop. Takes leases, keeps the engine fed, seals units, hands out receipts.

Runs in a thread of its own; `submit` and `stats` may be called from others.

Invariants:
- the engine is stepped only while the rows on their way to disk leave room for another step (back-pressure happens
  here, never inside a worker);
- units overlap: requests of the next unit go in while the last ones of a unit still run and while it is sealed;
- an attempt ends exactly once, with a receipt or a failure;
- an exception out of the engine's step ends the feeder: the engine is broken and the actor must be replaced.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from actors.logprobs import row_logprobs
from actors.profile import StageClock, WorkerTimes, engine_profile
from actors.protocol import EngineSpec, EngineStats, InvokeOutcome, Lease, Receipt, UnitFailure
from actors.worker.llm import Finished, Request
from storage.plan_files import SPANS_FIELD, PlanReader
from storage.unit_writer import UnitReceipt

# Requests waiting in the engine beyond those that run: enough that a step is never short, few enough to stay cheap.
QUEUED_REQUESTS_PER_SLOT = 2
# How long the loop sleeps while it waits for the sinks: for a seal, or for room in a full ring.
SINK_WAIT_S = 0.002
# How often the sinks are asked for results while the engine steps: each time is a round trip to every rank.
POLL_INTERVAL_S = 0.03


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedInvoke:
    """An invoke of a unit, as the plan has it."""

    invoke: int
    unit_row: int
    n_rows: int
    max_tokens: int
    token_ids: list[int]
    truncated: bool = False
    """The prompt was cut to the model's length."""
    row_spans: list[int] | None = None
    """Begin, end, begin, end, ... of the prompt's tokens that may have rows; None: all of them."""


def read_planned(plan: PlanReader, unit: int, *, unit_rows: int) -> Iterator[PlannedInvoke]:
    """The invokes of a unit of a plan whose units have `unit_rows` rows."""
    for row in plan.read_unit(unit).to_pylist():
        yield PlannedInvoke(
            invoke=row["invoke"],
            unit_row=row["row_start"] - unit * unit_rows,
            n_rows=row["n_rows"],
            max_tokens=row["max_tokens"],
            token_ids=row["token_ids"],
            truncated=row["truncated"],
            row_spans=row.get(SPANS_FIELD.name),
        )


class LlmLike(Protocol):
    """What the feeder needs of `actors.worker.llm.Llm`."""

    max_requests: int
    max_step_tokens: int
    compute_dtype: str

    @property
    def busy(self) -> bool: ...
    def add(self, request: Request) -> None: ...
    def step(self) -> list[Finished]: ...
    def abort(self, request_ids: list[str]) -> None: ...
    def call(self, method: str, *arguments: Any) -> list[Any]: ...


@dataclass(kw_only=True, slots=True)
class _Unit:
    lease: Lease
    result: Future[Receipt | UnitFailure]
    invokes: dict[str, PlannedInvoke] = field(default_factory=dict)
    outcomes: list[InvokeOutcome] = field(default_factory=list)
    receipts: list[Any] = field(default_factory=list)
    n_generated_tokens: int = 0
    begun_s: float = 0.0
    computed_s: float = 0.0


class Feeder:
    """See the module's docstring.

    Args:
        llm: the engine.
        spec: what the engine was made from.
        read_unit: the planned invokes of a unit.
    """

    def __init__(self, llm: LlmLike, spec: EngineSpec, read_unit: Callable[[int], Iterable[PlannedInvoke]]) -> None:
        self._llm = llm
        self._spec = spec
        self._read_unit = read_unit
        self._leases: deque[_Unit] = deque()
        self._waiting: deque[Request] = deque()
        self._units: dict[tuple[int, int], _Unit] = {}
        self._unit_of_request: dict[str, _Unit] = {}
        self._wake = threading.Condition()
        self._stopping = False
        self._stats = EngineStats(pid=os.getpid(), compute_dtype=llm.compute_dtype)
        self._clock = StageClock()
        self._rank_times: list[WorkerTimes] = []
        self._n_tokens = 0
        self._pending_bytes = 0
        self._polled_s = 0.0
        self._step_bytes = llm.max_step_tokens * spec.row_bytes
        if spec.ring_bytes < 2 * self._step_bytes:
            raise ValueError(
                f"limits.ring_bytes = {spec.ring_bytes:,} cannot hold the rows of two steps of {llm.max_step_tokens:,} "
                f"tokens ({2 * self._step_bytes:,} bytes at {spec.row_bytes:,} bytes a token): raise it, or lower "
                "engine.vllm.max_num_batched_tokens"
            )

    def submit(self, lease: Lease) -> Future[Receipt | UnitFailure]:
        """Queue a lease; the future gets its receipt or failure, or the engine's own error if the engine breaks."""
        unit = _Unit(lease=lease, result=Future())
        with self._wake:
            self._leases.append(unit)
            self._wake.notify()
        return unit.result

    @property
    def stats(self) -> EngineStats:
        """Counters since the start, those of the sinks as of the last time they were asked."""
        stages = self._clock.times()
        profile = engine_profile(
            stages, self._rank_times, step_room=self._llm.max_step_tokens, writers=self._spec.writer_threads
        )
        return replace(self._stats, gated_s=profile.gated_s, profile=profile)

    def stop(self) -> None:
        """End `run` at the next turn of its loop; units in flight fail."""
        with self._wake:
            self._stopping = True
            self._wake.notify()

    def run(self) -> None:
        """The loop. Returns after `stop`; raises what the engine raises."""
        try:
            while not self._stopping:
                self._turn()
        except BaseException as error:
            self._break(error)
            raise
        finally:
            self._clock.enter(None)
        self._break(RuntimeError("the engine was stopped"))

    def _turn(self) -> None:
        self._clock.enter("plan")
        self._admit_leases()
        self._clock.enter("feed")
        self._feed()
        if self._llm.busy and self._has_room():
            self._clock.enter("forward")
            ended = self._llm.step()
            self._clock.enter("settle")
            for finished in ended:
                self._end_request(finished)
            # Assume the fullest step until the sinks have been asked.
            self._pending_bytes += self._step_bytes
            if time.monotonic() - self._polled_s >= POLL_INTERVAL_S:
                self._poll()
            return
        self._clock.enter("gated" if self._llm.busy else "sealing" if self._units else "idle")
        self._poll()
        if self._llm.busy and self._has_room():
            return  # steps were smaller than assumed
        with self._wake:
            if not self._leases and not self._stopping:
                self._wake.wait(SINK_WAIT_S if self._llm.busy or self._units else 0.5)

    def _has_room(self) -> bool:
        return self._pending_bytes + self._step_bytes <= self._spec.ring_bytes

    def _admit_leases(self) -> None:
        while self._leases:
            unit = self._leases.popleft()
            lease = unit.lease
            try:
                invokes = list(self._read_unit(lease.unit))
                self._llm.call("harvest_begin_unit", lease.unit, lease.attempt)
            except Exception as error:
                unit.result.set_result(UnitFailure.of(lease.unit, lease.attempt, error))
                continue
            unit.begun_s = time.monotonic()
            self._units[lease.unit, lease.attempt] = unit
            for invoke in invokes:
                request_id = f"{lease.unit}.{lease.attempt}.{invoke.invoke}"
                unit.invokes[request_id] = invoke
                self._unit_of_request[request_id] = unit
                self._waiting.append(
                    Request(
                        request_id=request_id,
                        token_ids=invoke.token_ids,
                        max_tokens=invoke.max_tokens,
                        harvest={
                            "unit": lease.unit,
                            "attempt": lease.attempt,
                            "invoke": invoke.invoke,
                            "unit_row": invoke.unit_row,
                            "n_prompt": len(invoke.token_ids),
                            "spans": invoke.row_spans,
                        },
                    )
                )
            if not invokes:
                self._seal(unit)

    def _feed(self) -> None:
        room = QUEUED_REQUESTS_PER_SLOT * self._llm.max_requests - len(self._unit_of_request) + len(self._waiting)
        while self._waiting and room > 0:
            request = self._waiting.popleft()
            room -= 1
            unit = self._unit_of_request.get(request.request_id)
            if unit is None:
                continue
            try:
                self._llm.add(request)
            except Exception as error:
                self._fail(unit, UnitFailure.of(unit.lease.unit, unit.lease.attempt, error))

    def _end_request(self, finished: Finished) -> None:
        unit = self._unit_of_request.pop(finished.request_id, None)
        if unit is None:
            return
        planned = unit.invokes[finished.request_id]
        n_prompt = len(planned.token_ids)
        n_rows = planned.n_rows
        n_generated = len(finished.token_ids)
        generates = self._spec.selection.takes_generated
        logprobs = None
        if generates and (n_generated < planned.max_tokens or finished.logprobs is not None):
            positions = self._spec.selection.positions(
                n_prompt_tokens=n_prompt,
                max_tokens=planned.max_tokens,
                invoke=planned.invoke,
                token_ids=planned.token_ids,
                spans=planned.row_spans,
            )
            # The last generated token is never fed back, so it has no row.
            n_rows = int(np.searchsorted(positions, n_prompt + max(n_generated, 1) - 1))
            if finished.logprobs is not None:
                logprobs = row_logprobs(positions[:n_rows], n_prompt=n_prompt, sampled=finished.logprobs)
        unit.n_generated_tokens += n_generated
        self._n_tokens += n_prompt + n_generated - 1
        unit.outcomes.append(
            InvokeOutcome(
                invoke=planned.invoke,
                unit_row=planned.unit_row,
                n_planned_rows=planned.n_rows,
                n_rows=n_rows,
                status="truncated" if planned.truncated else "ok",
                may_have_surplus=generates,
                logprobs=logprobs,
            )
        )
        if len(unit.outcomes) == len(unit.invokes):
            self._seal(unit)

    def _seal(self, unit: _Unit) -> None:
        unit.computed_s = time.monotonic()
        self._llm.call("harvest_seal_unit", unit.lease.unit, unit.lease.attempt, tuple(unit.outcomes))

    def _poll(self) -> None:
        ranks = self._llm.call("harvest_poll")
        self._polled_s = time.monotonic()
        self._pending_bytes = max(state.pending_bytes for state, _ in ranks)
        self._rank_times = [state.times for state, _ in ranks]
        for _, results in ranks:
            for result in results:
                unit = self._units.get((result.unit, result.attempt))
                if unit is None:
                    continue
                if isinstance(result, UnitFailure):
                    self._fail(unit, result)
                    continue
                unit.receipts.append(result.receipt)
                if len(unit.receipts) == len(ranks):
                    self._finish(unit)
        depth = ranks[0][0].depth
        self._stats = EngineStats(
            n_tokens=self._n_tokens,
            n_rows=ranks[0][0].n_rows,
            written_bytes=sum(state.written_bytes for state, _ in ranks),
            pending_bytes=self._pending_bytes,
            n_steps=ranks[0][0].n_steps,
            n_recomputed=ranks[0][0].n_recomputed,
            pid=os.getpid(),
            compute_dtype=self._llm.compute_dtype,
            n_layers=depth.n_layers if depth else 0,
            n_layers_run=depth.n_layers_run if depth else 0,
        )

    def _finish(self, unit: _Unit) -> None:
        del self._units[unit.lease.unit, unit.lease.attempt]
        kept = [receipt for receipt in unit.receipts if receipt is not None]
        merged = UnitReceipt.merge(kept) if kept else None
        n_rows = sum(outcome.n_rows for outcome in unit.outcomes)
        unit.result.set_result(
            Receipt(
                lease=unit.lease,
                storage=merged,
                n_invokes=len(unit.invokes),
                n_prompt_tokens=sum(len(invoke.token_ids) for invoke in unit.invokes.values()),
                n_generated_tokens=unit.n_generated_tokens,
                n_rows=n_rows,
                stored_bytes=n_rows * self._spec.row_bytes,
                engine_s=unit.computed_s - unit.begun_s,
                seal_s=time.monotonic() - unit.computed_s,
            )
        )

    def _fail(self, unit: _Unit, failure: UnitFailure) -> None:
        self._units.pop((unit.lease.unit, unit.lease.attempt), None)
        live = [name for name in unit.invokes if self._unit_of_request.pop(name, None) is not None]
        self._llm.abort(live)
        self._llm.call("harvest_abort_unit", unit.lease.unit, unit.lease.attempt)
        unit.result.set_result(failure)

    def _break(self, error: BaseException) -> None:
        for unit in (*self._units.values(), *self._leases):
            if not unit.result.done():
                unit.result.set_exception(error)
        self._units.clear()
        self._leases.clear()
