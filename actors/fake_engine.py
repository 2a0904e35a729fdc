"""ScriptedLlm: an engine without a model, for tests of scheduling, commit and resume, and for dry runs.

It stands where `actors.worker.llm.Llm` stands, so the feeder, the row book, the sink, the staged files and everything
behind them are the real ones. Rows are a fixed function of (invoke, position, location), so that any two runs of a plan
must store the same bytes; a reduced row is that of its label's position. Failures follow a script.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actors.host_rows import ArrayRows
from actors.logprobs import LOGPROBS
from actors.profile import WorkerTimes
from actors.protocol import EngineSpec
from actors.sealing import seal_unit
from actors.sink import Sink, StepBatch
from actors.worker.llm import Finished, Request
from actors.worker.rows import Registration, RowBook
from actors.worker.step import StepRows
from storage.commit import ATTEMPTS
from storage.unit_writer import UnitWriter


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """What goes wrong, by invoke."""

    die_on: frozenset[int] = frozenset()
    """SIGKILL this process when one of these invokes is in a step."""
    hang_on: frozenset[int] = frozenset()
    """Never return from a step with one of these."""
    hang_attempts: int | None = None
    """Hang in so many attempts at a unit and not in later ones; None: in all."""
    raise_on: frozenset[int] = frozenset()
    """Raise out of a step with one of these."""
    step_s: float = 0.0
    """Time that a step takes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _State:
    pending_bytes: int
    written_bytes: int
    n_rows: int
    n_steps: int
    times: WorkerTimes
    n_recomputed: int = 0
    depth: None = None


class ScriptedLlm:
    """See the module's docstring."""

    max_requests = 16
    max_step_tokens = 512
    compute_dtype = "float32"

    def __init__(self, spec: EngineSpec, script: Script) -> None:
        self._spec = spec
        self._script = script
        self._book = RowBook()
        self._queue: list[Request] = []
        self._done: dict[str, int] = {}
        self._n_rows = self._n_steps = self._n_tokens = 0
        self._sink = Sink(
            open_writer=lambda unit, attempt: UnitWriter(Path(spec.run_path), spec.layout, unit=unit, attempt=attempt),
            seal_writer=seal_unit,
            arrays=[array for array in spec.layout.arrays if array != LOGPROBS],
            threads=spec.writer_threads,
            join_bytes=spec.ring_bytes // 8,
        )

    @property
    def busy(self) -> bool:
        """True while requests are unfinished."""
        return bool(self._queue)

    def add(self, request: Request) -> None:
        """Queue a request."""
        registration = Registration.of(
            request.harvest, self._spec.selection, max_tokens=request.max_tokens, token_ids=request.token_ids
        )
        self._book.register(request.request_id, registration)
        self._queue.append(request)
        self._done[request.request_id] = 0

    def step(self) -> list[Finished]:
        """Pass the next tokens of the first requests, prompts in chunks."""
        time.sleep(self._script.step_s)
        left = self.max_step_tokens
        batch: list[tuple[Request, int, int]] = []
        for request in self._queue[: self.max_requests]:
            first = self._done[request.request_id]
            count = min(len(request.token_ids) - first, left)
            if count:
                batch.append((request, first, count))
                left -= count
        self._misbehave([request.harvest for request, _, _ in batch])
        self._take(batch)
        finished = []
        for request, first, count in batch:
            self._done[request.request_id] = first + count
            if first + count == len(request.token_ids):
                logprobs = (-1.0,) if self._spec.layout.logprobs else None
                finished.append(
                    Finished(request_id=request.request_id, token_ids=(0,), finish_reason="length", logprobs=logprobs)
                )
        ended = {each.request_id for each in finished}
        self._queue = [request for request in self._queue if request.request_id not in ended]
        return finished

    def _misbehave(self, harvests: list[dict[str, Any]]) -> None:
        invokes = {harvest["invoke"] for harvest in harvests}
        if invokes & self._script.die_on:
            os.kill(os.getpid(), signal.SIGKILL)
        limit = self._script.hang_attempts
        hanging = {x["invoke"] for x in harvests if limit is None or x["attempt"] % ATTEMPTS <= limit}
        while hanging & self._script.hang_on:
            time.sleep(1)
        if invokes & self._script.raise_on:
            raise RuntimeError(f"scripted failure on invokes {sorted(invokes & self._script.raise_on)}")

    def _take(self, batch: list[tuple[Request, int, int]]) -> None:
        counts = [count for _, _, count in batch]
        step = StepRows.checked(
            request_ids=tuple(request.request_id for request, _, _ in batch),
            starts=np.concatenate([[0], np.cumsum(counts)]),
            first_positions=np.array([first for _, first, _ in batch]),
            scheduled={request.request_id: count for request, _, count in batch},
        )
        take = self._book.take(step)
        if take is None:
            return
        self._n_steps += 1
        self._n_tokens += sum(counts)
        if not len(take.segments):
            return
        ids = np.concatenate([request.token_ids[first : first + count] for request, first, count in batch])
        values: dict[str, NDArray[Any]] = {
            "tokens/id": ids[take.label_rows].astype(np.int32),
            "tokens/position": take.positions,
            "tokens/invoke": take.invokes,
        }
        for index, location in enumerate(self._spec.layout.locations):
            values[location.array] = scripted_rows(take.invokes, take.positions, index, location.width)
        rows = {array: ArrayRows(values_of_array) for array, values_of_array in values.items()}
        self._sink.submit(StepBatch(rows=rows, segments=take.segments))
        self._n_rows += len(take.positions)

    def abort(self, request_ids: list[str]) -> None:
        """End requests early."""
        ended = set(request_ids)
        self._queue = [request for request in self._queue if request.request_id not in ended]

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """The worker methods that the feeder calls, for one rank."""
        match method:
            case "harvest_begin_unit":
                self._sink.open_unit(*arguments)
                return [None]
            case "harvest_seal_unit":
                self._book.forget_unit(*arguments[:2])
                self._sink.seal(*arguments)
                return [None]
            case "harvest_abort_unit":
                self._book.forget_unit(*arguments)
                self._sink.abort(*arguments)
                return [None]
            case "harvest_poll":
                state = _State(
                    pending_bytes=self._sink.pending_bytes,
                    written_bytes=self._sink.written_bytes,
                    n_rows=self._n_rows,
                    n_steps=self._n_steps,
                    times=replace(self._sink.times, n_steps=self._n_steps, n_step_tokens=self._n_tokens),
                )
                return [(state, self._sink.poll())]
        raise ValueError(f"no worker method {method}")

    def close(self) -> None:
        """Stop the sink's threads."""
        self._sink.close()


def scripted_rows(
    invokes: NDArray[np.int64], positions: NDArray[np.int32], location: int, width: int
) -> NDArray[np.float32]:
    """Rows [M, width] that name their invoke, position and location."""
    columns = np.arange(width, dtype=np.float32)
    key = invokes.astype(np.float64) * 31 + positions * 7 + location * 3 + 1
    return (np.sin(key)[:, None] + columns / 64).astype(np.float32)
