"""Which rows of a run's units are stored: all that the plan reserved, but for answers that ended early. Pure numpy.

Rows of no invoke are holes; a loader must neither hand them out nor read the store to find them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from storage.reader import StoreReader

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
    """Stretches of consecutive places in a store, [n] each."""

    begins: Ints
    ends: Ints
    counts: Ints
    """Stored rows in each, at least 1."""

    def __len__(self) -> int:
        return len(self.counts)

    def chosen(self, index: Ints | slice) -> Blocks:
        """Some of them, in the order of `index`."""
        return Blocks(begins=self.begins[index], ends=self.ends[index], counts=self.counts[index])


class PlannedRows:
    """The places that a run's plan gave to its invokes; read once."""

    def __init__(self, reader: StoreReader) -> None:
        self._reader = reader
        # The plan's table is in the order of units.
        plan = reader.run.plan.summary()
        self._unit_of = plan.column("unit").to_numpy()
        self._invokes = plan.column("invoke").to_numpy()
        self._starts = plan.column("row_start").to_numpy()
        self._counts = plan.column("n_rows").to_numpy()

    def stored(self, units: Sequence[int]) -> StoredRows:
        """The stored rows of committed units."""
        numbers = np.array(sorted(units), np.int64)
        firsts = np.searchsorted(self._unit_of, numbers).tolist()
        lasts = np.searchsorted(self._unit_of, numbers, side="right").tolist()
        spans = zip(numbers.tolist(), firsts, lasts, strict=True)
        starts = [np.zeros(0, np.int64)] + [self._starts[first:last] for first, last in zip(firsts, lasts, strict=True)]
        counts = [np.zeros(0, np.int64)] + [self._stored_counts(*span) for span in spans]
        return StoredRows(
            units=numbers,
            unit_rows=self._reader.layout.unit_rows,
            starts=np.concatenate(starts),
            counts=np.concatenate(counts),
        )

    def _stored_counts(self, unit: int, first: int, last: int) -> Ints:
        planned: Ints = self._counts[first:last]
        if int(planned.sum()) == self._reader.stored_rows(unit):
            return planned
        stored = {each.invoke: each.n_rows for each in self._reader.receipt(unit).invokes}
        return np.array([stored[invoke] for invoke in self._invokes[first:last].tolist()], np.int64)


class StoredRows:
    """The stored rows of some units, as spans: [spans] first places and counts, in any order."""

    def __init__(self, *, units: Ints, unit_rows: int, starts: Ints, counts: Ints) -> None:
        self._units = units
        self._unit_rows = unit_rows
        order = np.argsort(starts, kind="stable")
        order = order[counts[order] > 0]
        self._starts = starts[order].astype(np.int64)
        self._counts = counts[order].astype(np.int64)
        self._before = np.concatenate([[0], np.cumsum(self._counts)])

    @property
    def n_rows(self) -> int:
        """Stored rows of all units."""
        return int(self._before[-1])

    def count_before(self, places: Ints) -> Ints:
        """[n] stored rows before each place, of these units."""
        if not len(self._starts):
            return np.zeros(len(places), np.int64)
        span = np.searchsorted(self._starts, places, side="right") - 1
        inside = np.clip(places - self._starts[span], 0, self._counts[span])
        counted: Ints = np.where(span < 0, 0, self._before[span] + inside)
        return counted

    def blocks(self, block_rows: int) -> Blocks:
        """All stored rows in blocks of at most `block_rows` places, in order; none of them crosses a unit's border."""
        within = np.arange(0, self._unit_rows, block_rows, dtype=np.int64)
        begins = (self._units[:, None] * self._unit_rows + within).ravel()
        ends = np.minimum(begins + block_rows, np.repeat((self._units + 1) * self._unit_rows, len(within)))
        counts = self.count_before(ends) - self.count_before(begins)
        return Blocks(begins=begins, ends=ends, counts=counts).chosen(np.flatnonzero(counts))

    def mask(self, begin: int, end: int) -> NDArray[np.bool_]:
        """[end - begin] which places of a block hold a stored row."""
        found = np.zeros(end - begin, np.bool_)
        first = max(0, int(np.searchsorted(self._starts, begin, side="right")) - 1)
        for index in range(first, int(np.searchsorted(self._starts, end))):
            start = int(self._starts[index])
            found[max(0, start - begin) : max(0, start + int(self._counts[index]) - begin)] = True
        return found
