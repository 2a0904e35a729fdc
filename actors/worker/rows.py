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

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actors.selection import Selection
from actors.worker.reduced_requests import ReducedRequests, StepReduction
from actors.worker.segments import Segments, runs
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

    @classmethod
    def of(
        cls, harvest: Mapping[str, Any], selection: Selection, *, max_tokens: int, token_ids: Sequence[int] | None
    ) -> Registration:
        """A request with the rows that a selection gives it.

        Args:
            harvest: what came with the request; see `actors.worker.llm.Request`.
            selection: which positions get a row.
            max_tokens: tokens that the request may generate.
            token_ids: of its prompt.
        """
        return cls(
            unit=harvest["unit"],
            attempt=harvest["attempt"],
            invoke=harvest["invoke"],
            unit_row=harvest["unit_row"],
            positions=selection.positions(
                n_prompt_tokens=harvest["n_prompt"],
                max_tokens=max_tokens,
                invoke=harvest["invoke"],
                token_ids=token_ids,
                spans=harvest.get("spans"),
            ),
            reduced=selection.reduce is not None,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTake:
    """What to copy out of one step. M is the number of taken rows, R of those to be stored: M, unless reduced."""

    source_rows: NDArray[np.int64]
    """[M] row indices in the step, in the order of the segments."""
    leading: bool
    """True when source_rows is exactly 0..M-1, so that a slice does."""
    segments: Segments
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


_COLUMNS = ("unit", "attempt", "invoke", "row", "next", "first", "wanted", "reduced")
_UNIT, _ATTEMPT, _INVOKE, _ROW, _NEXT, _FIRST, _WANTED, _REDUCED = range(len(_COLUMNS))


class RowBook:
    """Registered requests and how far each has been captured, in columns: a step costs a few array operations."""

    def __init__(self) -> None:
        self._slots: dict[str, int] = {}
        self._free: list[int] = []
        self._columns = np.zeros((len(_COLUMNS), 64), np.int64)
        # Positions of requests that want other ones than a run of consecutive ones.
        self._sparse: dict[int, NDArray[np.int64]] = {}
        self._reduced = ReducedRequests()
        self.n_recomputed = 0
        """Tokens that came a second time, after a preemption."""

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._slots

    def next_position(self, request_id: str) -> int:
        """The first position of a known request that has not passed through a step."""
        return int(self._columns[_NEXT, self._slots[request_id]])

    def register(self, request_id: str, registration: Registration) -> None:
        """Make a request known; registering it again (vLLM resumes a preempted request as new) changes nothing."""
        if request_id in self._slots:
            return
        if not self._free:
            n_slots = self._columns.shape[1]
            if len(self._slots) == n_slots:
                self._columns = np.concatenate([self._columns, np.zeros_like(self._columns)], axis=1)
                n_slots *= 2
            self._free = list(range(n_slots - 1, len(self._slots) - 1, -1))
        slot = self._slots[request_id] = self._free.pop()
        positions = registration.positions
        n_wanted = len(positions)
        first = int(positions[0]) if n_wanted else 0
        if n_wanted and int(positions[-1]) - first + 1 != n_wanted:
            self._sparse[slot] = positions
        self._columns[:, slot] = (
            registration.unit,
            registration.attempt,
            registration.invoke,
            registration.unit_row,
            0,
            first,
            n_wanted,
            registration.reduced,
        )

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop requests that have ended."""
        for request_id in request_ids:
            slot = self._slots.pop(request_id, None)
            if slot is not None:
                self._free.append(slot)
                self._sparse.pop(slot, None)
            self._reduced.forget(request_id)

    def forget_unit(self, unit: int, attempt: int) -> None:
        """Drop all requests of an attempt: nothing that arrives later is taken."""
        units, attempts = self._columns[_UNIT], self._columns[_ATTEMPT]
        self.forget([name for name, at in self._slots.items() if (units[at], attempts[at]) == (unit, attempt)])

    def take(self, step: StepRows) -> StepTake | None:
        """The rows to copy out of `step`, or None when there are none."""
        known = self._slots
        slots = np.fromiter((known.get(name, -1) for name in step.request_ids), np.int64, len(step.request_ids))
        requests = np.flatnonzero(slots >= 0)
        if not len(requests):
            return None
        slots = slots[requests]
        starts = step.starts[requests]
        firsts = step.first_positions[requests]
        afters = firsts + step.starts[requests + 1] - starts
        seen = self._columns[_NEXT, slots]
        self._check_gaps(slots, firsts, seen)
        self._columns[_NEXT, slots] = np.maximum(seen, afters)
        self.n_recomputed += int((np.minimum(seen, afters) - firsts).sum())
        lows, highs = self._wanted(slots, seen, afters)
        kept = np.flatnonzero(highs > lows)
        if not len(kept):
            return None
        slots, lows, highs = slots[kept], lows[kept], highs[kept]
        counts = highs - lows
        wanted = np.repeat(self._columns[_FIRST, slots] + lows, counts) + runs(counts)
        begins = np.cumsum(counts) - counts
        for index, positions in self._sparse_among(slots):
            wanted[begins[index] : begins[index] + counts[index]] = positions[lows[index] : highs[index]]
        sources = wanted - np.repeat((firsts - starts)[kept], counts)
        sampled = np.where(wanted == np.repeat(afters[kept] - 1, counts), np.repeat(requests[kept], counts), -1)
        invokes = np.repeat(self._columns[_INVOKE, slots], counts)
        n_rows = len(wanted)
        is_reduced = self._columns[_REDUCED, slots]
        reduction = None
        if is_reduced.any():
            names = [step.request_ids[index] for index in requests[kept].tolist()]
            reduction = self._reduce(names, slots, counts, highs)
            wanted, invokes = wanted[reduction.last_rows], invokes[reduction.last_rows]
            # A reduced request gives one row, at its first place, with the last of its positions.
            slots = slots[reduction.ended]
            lows, begins, counts = (np.zeros_like(slots), np.arange(len(slots)), np.ones_like(slots))
        return StepTake(
            source_rows=sources,
            leading=bool(sources[0] == 0 and sources[-1] == n_rows - 1 and (np.diff(sources) == 1).all()),
            segments=Segments.of(
                units=self._columns[_UNIT, slots],
                attempts=self._columns[_ATTEMPT, slots],
                unit_rows=self._columns[_ROW, slots] + lows,
                begins=begins,
                counts=counts,
            ),
            invokes=invokes,
            positions=wanted.astype(np.int32),
            sampled_rows=sampled,
            reduction=reduction,
        )

    def _check_gaps(self, slots: NDArray[np.int64], firsts: NDArray[np.int64], seen: NDArray[np.int64]) -> None:
        gaps = np.flatnonzero(firsts > seen)
        if len(gaps):
            slot, first, upto = slots[gaps[0]], firsts[gaps[0]], seen[gaps[0]]
            raise StepRowsError(
                f"invoke {self._columns[_INVOKE, slot]} of unit {self._columns[_UNIT, slot]}: positions "
                f"{upto}..{first - 1} never passed through a step (prefix caching or an unknown feature is on)"
            )

    def _wanted(
        self, slots: NDArray[np.int64], seen: NDArray[np.int64], afters: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Which of its wanted positions each request passes in this step, for the first time: from, to."""
        first, n_wanted = self._columns[_FIRST, slots], self._columns[_WANTED, slots]
        lows = np.clip(seen - first, 0, n_wanted)
        highs = np.clip(afters - first, 0, n_wanted)
        for index, positions in self._sparse_among(slots):
            lows[index], highs[index] = np.searchsorted(positions, (seen[index], afters[index]))
        return lows, highs

    def _sparse_among(self, slots: NDArray[np.int64]) -> list[tuple[int, NDArray[np.int64]]]:
        """Indices and wanted positions of those that want no run; costs nothing where no request is so."""
        sparse = self._sparse
        return [(index, sparse[slot]) for index, slot in enumerate(slots.tolist()) if slot in sparse] if sparse else []

    def _reduce(
        self, names: list[str], slots: NDArray[np.int64], counts: NDArray[np.int64], covered: NDArray[np.int64]
    ) -> StepReduction:
        reductions = self._reduced.begin_step()
        n_wanted, is_reduced = self._columns[_WANTED, slots], self._columns[_REDUCED, slots]
        for index, name in enumerate(names):
            if is_reduced[index]:
                reductions.add(name, int(counts[index]), covered=int(covered[index]), of=int(n_wanted[index]))
        reduction = reductions.finish(n_rows=int(counts.sum()))
        assert reduction is not None
        return reduction
