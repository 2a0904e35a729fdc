"""Segments: which stored rows of a step go where, in columns, so that hundreds of requests cost a few array operations.

A pure value of numpy arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Segments:
    """S runs of consecutive rows of a step that go to consecutive rows of a unit, each of one request."""

    attempts: tuple[tuple[int, int], ...]
    """(unit, attempt) of all of them, each once."""
    attempt_of: Ints
    """[S] index in `attempts`."""
    unit_rows: Ints
    """[S] first row, counted inside its unit."""
    begins: Ints
    """[S] index of the first row among the rows that the step stores."""
    counts: Ints
    """[S] rows, at least 1."""

    @classmethod
    def of(cls, *, units: Ints, attempts: Ints, unit_rows: Ints, begins: Ints, counts: Ints) -> Segments:
        """Segments of one or several attempts; all arguments are [S]."""
        if len(units) and (units == units[0]).all() and (attempts == attempts[0]).all():
            keys: Sequence[tuple[int, int]] = [(int(units[0]), int(attempts[0]))]
            attempt_of = np.zeros(len(units), np.int64)
        else:
            numbers: dict[tuple[int, int], int] = {}
            pairs = zip(units.tolist(), attempts.tolist(), strict=True)
            attempt_of = np.array([numbers.setdefault(pair, len(numbers)) for pair in pairs], np.int64)
            keys = list(numbers)
        return cls(attempts=tuple(keys), attempt_of=attempt_of, unit_rows=unit_rows, begins=begins, counts=counts)

    def __len__(self) -> int:
        return len(self.counts)

    def chosen(self, mask: NDArray[np.bool_]) -> Segments:
        """Those where `mask` [S] is true."""
        return Segments(
            attempts=self.attempts,
            attempt_of=self.attempt_of[mask],
            unit_rows=self.unit_rows[mask],
            begins=self.begins[mask],
            counts=self.counts[mask],
        )

    def rows(self) -> tuple[Ints, Ints]:
        """Row by row: ([R] rows counted inside their units, [R] indices among the rows that the step stores)."""
        within = runs(self.counts)
        return np.repeat(self.unit_rows, self.counts) + within, np.repeat(self.begins, self.counts) + within


def runs(counts: Ints) -> Ints:
    """0..n-1 for each n of `counts`, one after the other."""
    ends = np.cumsum(counts)
    return np.arange(int(ends[-1]) if len(ends) else 0) - np.repeat(ends - counts, counts)
