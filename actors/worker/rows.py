"""RowBook: turns StepRows into what has to be copied out of a step, and where it goes.

Pure numpy; knows nothing of vLLM or torch.

Invariants:
- only registered requests get rows: profiling, warm-up and foreign requests are ignored;
- each wanted position of a request is taken once, at its first appearance: after preemption vLLM computes positions
  again, and those rows are dropped;
- positions arrive in order without gaps; a gap is an error, since the rows in it would be lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from actors.worker.step import StepRows, StepRowsError


@dataclass(frozen=True, kw_only=True, slots=True)
class Registration:
    """A request whose rows are wanted."""

    unit: int
    attempt: int
    invoke: int
    unit_row: int
    """First row of the invoke, counted inside its unit."""
    positions: NDArray[np.int64]
    """[n_rows] ascending positions that get a row; the i-th goes to `unit_row + i`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Consecutive taken rows that go to consecutive rows of one unit."""

    unit: int
    attempt: int
    unit_row: int
    begin: int
    """Index of the first row among the rows taken from this step."""
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTake:
    """What to copy out of one step. M is the number of taken rows."""

    source_rows: NDArray[np.int64]
    """[M] row indices in the step, in the order of the segments."""
    leading: bool
    """True when source_rows is exactly 0..M-1, so that a slice does."""
    segments: tuple[Segment, ...]
    invokes: NDArray[np.int64]
    """[M] invoke of each taken row."""
    positions: NDArray[np.int32]
    """[M] position of each taken row."""
    sampled_rows: NDArray[np.int64]
    """[M] row of the step's logits that belongs to the taken row, -1 where the sampler computes none."""


class RowBook:
    """Registered requests and how far each has been captured."""

    def __init__(self) -> None:
        self._registered: dict[str, Registration] = {}
        self._next_position: dict[str, int] = {}
        self.n_recomputed = 0
        """Tokens that came a second time, after a preemption."""

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._registered

    def register(self, request_id: str, registration: Registration) -> None:
        """Make a request known; registering it again (vLLM resumes a preempted request as new) changes nothing."""
        self._registered.setdefault(request_id, registration)
        self._next_position.setdefault(request_id, 0)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop requests that have ended."""
        for request_id in request_ids:
            self._registered.pop(request_id, None)
            self._next_position.pop(request_id, None)

    def forget_unit(self, unit: int, attempt: int) -> None:
        """Drop all requests of an attempt: nothing that arrives later is taken."""
        self.forget([name for name, r in self._registered.items() if (r.unit, r.attempt) == (unit, attempt)])

    def take(self, step: StepRows) -> StepTake | None:
        """The rows to copy out of `step`, or None when there are none."""
        sources: list[NDArray[np.int64]] = []
        invokes: list[NDArray[np.int64]] = []
        positions: list[NDArray[np.int64]] = []
        sampled: list[NDArray[np.int64]] = []
        segments: list[Segment] = []
        taken = 0
        for index, request_id in enumerate(step.request_ids):
            registration = self._registered.get(request_id)
            if registration is None:
                continue
            start, end = int(step.starts[index]), int(step.starts[index + 1])
            first = int(step.first_positions[index])
            upto = self._next_position[request_id]
            if first > upto:
                raise StepRowsError(
                    f"invoke {registration.invoke} of unit {registration.unit}: positions {upto}..{first - 1} never "
                    "passed through a step (prefix caching or an unknown feature is on)"
                )
            after = first + end - start
            self._next_position[request_id] = max(upto, after)
            self.n_recomputed += min(upto, after) - first
            low, high = np.searchsorted(registration.positions, (upto, after))
            count = int(high - low)
            if count <= 0:
                continue
            wanted = registration.positions[low:high]
            sources.append(wanted - (first - start))
            sampled.append(np.where(wanted == after - 1, index, -1))
            positions.append(wanted)
            invokes.append(np.full(count, registration.invoke, np.int64))
            segments.append(
                Segment(
                    unit=registration.unit,
                    attempt=registration.attempt,
                    unit_row=registration.unit_row + int(low),
                    begin=taken,
                    count=count,
                )
            )
            taken += count
        if not taken:
            return None
        source_rows = np.concatenate(sources)
        return StepTake(
            source_rows=source_rows,
            leading=bool(source_rows[0] == 0 and source_rows[-1] == taken - 1 and (np.diff(source_rows) == 1).all()),
            segments=tuple(segments),
            invokes=np.concatenate(invokes),
            positions=np.concatenate(positions).astype(np.int32),
            sampled_rows=np.concatenate(sampled),
        )
