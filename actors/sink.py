"""Sink: takes row batches from the forward pass and puts them into an attempt's staged shard files.

Called by the worker's thread between steps; owns writer threads. No vLLM, no Ray, no torch.

Invariants:
- no call waits for a file system: files are opened, written, sealed and dropped by the sink's own threads. What bounds
  memory is `pending_bytes`, by which the actor gates the engine's next step;
- rows of an attempt that is sealing, sealed or aborted are dropped, never mixed into anything;
- a unit seals only when each array has exactly the rows that the outcomes promise; a shortfall is an error by name;
- an error in a writer thread fails its attempt, and reaches the caller through `poll`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from actors.host_rows import HostRows
from actors.profile import SEALERS, WorkerTimes
from actors.protocol import InvokeOutcome, UnitFailure
from actors.row_joiner import SMALL_ROWS, RowJoiner
from actors.worker.segments import Segments

# Steps of fewer bytes are written by one thread.
ONE_TASK_BYTES = 1 << 20


class UnitWriterLike(Protocol):
    """What the sink needs of `storage.unit_writer.UnitWriter`."""

    sealed_files: int

    def write(self, array: str, row: int, data: NDArray[Any]) -> None: ...
    def clear(self, array: str, row: int, n: int) -> None: ...
    def mask(self, array: str) -> NDArray[np.bool_]: ...
    def abort(self) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBatch:
    """The rows of one step."""

    rows: Mapping[str, HostRows]
    """By array."""
    segments: Segments
    """Of every array."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sealed:
    """A sealed attempt on one rank."""

    unit: int
    attempt: int
    receipt: Any


@dataclass(kw_only=True, slots=True)
class _Attempt:
    opening: Future[UnitWriterLike]
    lock: threading.Lock = field(default_factory=threading.Lock)
    pending: int = 0
    sealing: bool = False
    error: BaseException | None = None
    idle: threading.Condition = field(default_factory=threading.Condition)
    rows_by_array: dict[str, int] = field(default_factory=dict)
    joiners: dict[str, RowJoiner] = field(default_factory=dict)

    @property
    def writer(self) -> UnitWriterLike:
        """Waits until its files are open; raises what opening them raised."""
        return self.opening.result()

    @property
    def sealed_files(self) -> int:
        """Files of it that are sealed; waits for nothing."""
        if not self.opening.done() or self.opening.exception() is not None:
            return 0
        return self.opening.result().sealed_files


class Sink:
    """Writer threads over the attempts in flight.

    Args:
        open_writer: makes the writer of (unit, attempt).
        seal_writer: seals a writer with its outcomes and returns the receipt.
        arrays: the arrays this sink is responsible for.
        threads: writer threads.
        join_bytes: bytes of small pieces that may wait for their neighbours.
    """

    def __init__(
        self,
        *,
        open_writer: Callable[[int, int], UnitWriterLike],
        seal_writer: Callable[[UnitWriterLike, Sequence[InvokeOutcome]], Any],
        arrays: Sequence[str],
        threads: int,
        join_bytes: int = 64 << 20,
    ) -> None:
        self._open_writer = open_writer
        self._seal_writer = seal_writer
        self._arrays = tuple(arrays)
        self._attempts: dict[tuple[int, int], _Attempt] = {}
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="harvest-writer")
        # Writers wait for it, and it for none of them.
        self._opener = ThreadPoolExecutor(1, thread_name_prefix="harvest-opener")
        # Sealing waits for writers, so it must not take a writer's thread.
        self._sealers = ThreadPoolExecutor(SEALERS, thread_name_prefix="harvest-sealer")
        self._done: deque[Sealed | UnitFailure] = deque()
        self._pending_bytes = 0
        self._waiting_bytes = 0
        self._join_bytes = join_bytes
        self._bytes_lock = threading.Lock()
        self.written_bytes = 0
        self._copy_wait_s = self._write_s = self._seal_s = 0.0
        self._n_sealed_files = 0

    @property
    def pending_bytes(self) -> int:
        """Host bytes submitted and not yet written."""
        return self._pending_bytes + self._waiting_bytes

    @property
    def times(self) -> WorkerTimes:
        """Seconds of the writer and sealing threads so far, and the files sealed."""
        with self._bytes_lock:
            sealing = sum(state.sealed_files for state in list(self._attempts.values()))
            return WorkerTimes(
                copy_wait_s=self._copy_wait_s,
                write_s=self._write_s,
                seal_s=self._seal_s,
                n_sealed_files=self._n_sealed_files + sealing,
            )

    def open_unit(self, unit: int, attempt: int) -> None:
        """Begin an attempt. Its files are opened in the background: that they cannot be is its failure."""
        state = _Attempt(opening=self._opener.submit(self._open_writer, unit, attempt))
        state.opening.add_done_callback(partial(_note_error, state))
        self._attempts[unit, attempt] = state

    def submit(self, batch: StepBatch) -> None:
        """Queue the rows of one step."""
        n_bytes = sum(rows.n_bytes for rows in batch.rows.values())
        # To wake a thread for each array costs more than to write a small step, and takes the step's thread's time.
        parts = [batch.rows] if n_bytes < ONE_TASK_BYTES else [{array: rows} for array, rows in batch.rows.items()]
        live = {}
        for key in batch.segments.attempts:
            attempt = self._attempts.get(key)
            if attempt is not None and not attempt.sealing:
                with attempt.idle:
                    attempt.pending += len(parts)
                live[key] = attempt
        with self._bytes_lock:
            self._pending_bytes += n_bytes
        for part in parts:
            self._pool.submit(self._write, part, batch.segments, live)

    def _write(
        self, part: Mapping[str, HostRows], segments: Segments, attempts: Mapping[tuple[int, int], _Attempt]
    ) -> None:
        n_bytes = sum(rows.n_bytes for rows in part.values())
        begun_s = copied_s = time.perf_counter()
        try:
            arrays = {array: rows.wait() for array, rows in part.items()}
            copied_s = time.perf_counter()
            for index, key in enumerate(segments.attempts):
                attempt = attempts.get(key)
                if attempt is None or attempt.error is not None:
                    continue
                mine = segments if len(segments.attempts) == 1 else segments.chosen(segments.attempt_of == index)
                try:
                    self._place(attempt, arrays, mine)
                except Exception as error:
                    attempt.error = error
        except Exception as error:
            for attempt in attempts.values():
                attempt.error = attempt.error or error
        finally:
            with self._bytes_lock:
                self._pending_bytes -= n_bytes
                self.written_bytes += n_bytes
                self._copy_wait_s += copied_s - begun_s
                self._write_s += time.perf_counter() - copied_s
            for attempt in attempts.values():
                with attempt.idle:
                    attempt.pending -= 1
                    attempt.idle.notify_all()

    def _place(self, attempt: _Attempt, arrays: Mapping[str, NDArray[Any]], segments: Segments) -> None:
        is_small = segments.counts < SMALL_ROWS
        large = segments.chosen(~is_small)
        pieces = list(zip(large.unit_rows.tolist(), large.begins.tolist(), large.counts.tolist(), strict=True))
        for array, rows in arrays.items():
            for row, begin, count in pieces:
                attempt.writer.write(array, row, rows[begin : begin + count])
        n_rows = int(segments.counts.sum())
        places, sources = segments.chosen(is_small).rows()
        with attempt.lock:
            for array, rows in arrays.items():
                if len(places):
                    joiner = attempt.joiners.setdefault(array, RowJoiner())
                    self._count_waiting(joiner.add(places, rows[sources]))
                    if joiner.is_full or self._waiting_bytes >= self._join_bytes:
                        self._flush(attempt, array, joiner)
                attempt.rows_by_array[array] = attempt.rows_by_array.get(array, 0) + n_rows

    def _flush(self, attempt: _Attempt, array: str, joiner: RowJoiner) -> None:
        self._count_waiting(-joiner.n_bytes)
        for row, run in joiner.drain():
            attempt.writer.write(array, row, run)

    def _count_waiting(self, n_bytes: int) -> None:
        with self._bytes_lock:
            self._waiting_bytes += n_bytes

    def seal(self, unit: int, attempt: int, outcomes: Sequence[InvokeOutcome]) -> None:
        """Begin to seal: returns at once, the result comes through `poll`."""
        state = self._attempts.get((unit, attempt))
        if state is None or state.sealing:
            return  # it has failed, and its failure is with, or on the way to, `poll`
        state.sealing = True
        self._sealers.submit(self._seal, unit, attempt, state, tuple(outcomes))

    def _seal(self, unit: int, attempt: int, state: _Attempt, outcomes: tuple[InvokeOutcome, ...]) -> None:
        with state.idle:
            state.idle.wait_for(lambda: state.pending == 0)
        begun_s = time.perf_counter()
        try:
            if state.error is not None:
                raise state.error
            for array, joiner in state.joiners.items():
                self._flush(state, array, joiner)
            surplus = self._give_back_surplus(state, outcomes)
            self._check_complete(unit, state, outcomes, surplus)
            receipt = self._seal_writer(state.writer, outcomes)
        except Exception as error:
            self._finish(unit, attempt, state)
            self._done.append(UnitFailure.of(unit, attempt, error))
            return
        with self._bytes_lock:
            self._seal_s += time.perf_counter() - begun_s
            self._n_sealed_files += state.sealed_files
            self._attempts.pop((unit, attempt), None)
        self._done.append(Sealed(unit=unit, attempt=attempt, receipt=receipt))

    def _give_back_surplus(self, state: _Attempt, outcomes: Sequence[InvokeOutcome]) -> int:
        """Rows of a step that ran beyond a request's end (asynchronous scheduling) become holes."""
        surplus = 0
        for outcome in outcomes:
            extra = outcome.n_planned_rows - outcome.n_rows
            if extra > 0 and outcome.may_have_surplus:
                end = outcome.unit_row + outcome.n_rows
                for array in self._arrays:
                    for row in np.flatnonzero(state.writer.mask(array)[end : end + extra]):
                        state.writer.clear(array, end + int(row), 1)
                surplus += extra
        return surplus

    def _check_complete(self, unit: int, state: _Attempt, outcomes: Sequence[InvokeOutcome], surplus: int) -> None:
        expected = sum(outcome.n_rows for outcome in outcomes)
        for array in self._arrays:
            got = state.rows_by_array.get(array, 0)
            if not expected <= got <= expected + surplus:
                raise UnitIncomplete(
                    f"unit {unit}: {array} has {got} of {expected} rows; its tap did not fire for every step. "
                    "Nothing of this unit was stored"
                )

    def abort(self, unit: int, attempt: int) -> None:
        """Drop an attempt and its staged files."""
        state = self._attempts.get((unit, attempt))
        if state is None:
            return
        state.sealing = True
        self._sealers.submit(self._drop, unit, attempt, state)

    def _drop(self, unit: int, attempt: int, state: _Attempt) -> None:
        """End an attempt once no thread is inside its writer any more."""
        with state.idle:
            state.idle.wait_for(lambda: state.pending == 0)
        self._finish(unit, attempt, state)

    def _finish(self, unit: int, attempt: int, state: _Attempt) -> None:
        self._attempts.pop((unit, attempt), None)
        for joiner in state.joiners.values():
            self._count_waiting(-joiner.n_bytes)
        state.joiners.clear()
        if state.opening.exception() is None:
            state.writer.abort()

    def _fail(self, unit: int, attempt: int, state: _Attempt) -> None:
        """Drop an attempt whose writer failed."""
        self._drop(unit, attempt, state)
        assert state.error is not None
        self._done.append(UnitFailure.of(unit, attempt, state.error))

    def poll(self) -> list[Sealed | UnitFailure]:
        """Seals and failures since the last call."""
        for key, state in list(self._attempts.items()):
            if state.error is not None and not state.sealing:
                state.sealing = True
                self._sealers.submit(self._fail, *key, state)
        results = []
        while self._done:
            results.append(self._done.popleft())
        return results

    def close(self) -> None:
        """Wait for the threads; attempts in flight are aborted."""
        self._opener.shutdown(wait=True)
        self._pool.shutdown(wait=True)
        self._sealers.shutdown(wait=True)
        for key, state in list(self._attempts.items()):
            self._finish(*key, state)


def _note_error(state: _Attempt, opening: Future[UnitWriterLike]) -> None:
    state.error = state.error or opening.exception()


class UnitIncomplete(RuntimeError):
    """A unit whose rows are not all there."""


class NullWriter:
    """Takes rows and keeps none: measures the path up to host memory."""

    sealed_files = 0

    def write(self, array: str, row: int, data: NDArray[Any]) -> None:
        """Drop the rows."""

    def clear(self, array: str, row: int, n: int) -> None:
        """Nothing to give back."""

    def mask(self, array: str) -> NDArray[np.bool_]:
        """No row is kept."""
        return np.zeros(0, np.bool_)

    def abort(self) -> None:
        """Nothing to drop."""
