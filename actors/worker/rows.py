"""RowBook: turns StepRows into what has to be copied out of a step, and where it goes.

Pure numpy; knows nothing of vLLM or torch.

Invariants:
- only registered requests get rows: profiling, warm-up and foreign requests are ignored;
- each wanted position of a request is taken once, at its first appearance: after preemption vLLM computes positions
  again, and those rows are dropped;
- positions arrive in order without gaps; a gap is an error, since the rows in it would be lost;
- a request that is reduced to one row has each of its positions counted once, and gives that row with the last of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from actors.worker.reduced_requests import ReducedRequests, StepReduction
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
    reduced: bool = False
    """The positions become one row together, at `unit_row`."""

    def segment(self, row: int, *, begin: int, count: int) -> Segment:
        """`count` of its rows from its `row`-th on, which are those from `begin` on among the step's stored rows."""
        return Segment(unit=self.unit, attempt=self.attempt, unit_row=self.unit_row + row, begin=begin, count=count)


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Consecutive rows of a step that go to consecutive rows of one unit."""

    unit: int
    attempt: int
    unit_row: int
    begin: int
    """Index of the first row among the rows that the step stores."""
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTake:
    """What to copy out of one step. M is the number of taken rows, R of those to be stored: M, unless reduced."""

    source_rows: NDArray[np.int64]
    """[M] row indices in the step, in the order of the segments."""
    leading: bool
    """True when source_rows is exactly 0..M-1, so that a slice does."""
    segments: tuple[Segment, ...]
    """Of the stored rows."""
    invokes: NDArray[np.int64]
    """[R] invoke of each stored row."""
    positions: NDArray[np.int32]
    """[R] position of each stored row."""
    sampled_rows: NDArray[np.int64]
    """[M] row of the step's logits that belongs to the taken row, -1 where the sampler computes none."""
    reduction: StepReduction | None = None
    """How the taken rows become the stored ones; None: they are the same."""

    @property
    def label_rows(self) -> NDArray[np.int64]:
        """[R] row indices in the step of the tokens that label the stored rows."""
        return self.source_rows if self.reduction is None else self.source_rows[self.reduction.last_rows]


class RowBook:
    """Registered requests and how far each has been captured."""

    def __init__(self) -> None:
        self._registered: dict[str, Registration] = {}
        self._next_position: dict[str, int] = {}
        self._reduced = ReducedRequests()
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
            self._reduced.forget(request_id)

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
        reductions = self._reduced.begin_step()
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
            if not registration.reduced:
                segments.append(registration.segment(int(low), begin=taken, count=count))
            elif reductions.add(request_id, count, covered=int(high), of=len(registration.positions)):
                segments.append(registration.segment(0, begin=len(segments), count=1))
            taken += count
        if not taken:
            return None
        source_rows = np.concatenate(sources)
        all_invokes = np.concatenate(invokes)
        all_positions = np.concatenate(positions).astype(np.int32)
        reduction = reductions.finish(n_rows=taken)
        return StepTake(
            source_rows=source_rows,
            leading=bool(source_rows[0] == 0 and source_rows[-1] == taken - 1 and (np.diff(source_rows) == 1).all()),
            segments=tuple(segments),
            invokes=all_invokes if reduction is None else all_invokes[reduction.last_rows],
            positions=all_positions if reduction is None else all_positions[reduction.last_rows],
            sampled_rows=np.concatenate(sampled),
            reduction=reduction,
        )
