"""RowJoiner: gathers small pieces of rows until consecutive ones can be written together.

A decode step gives each request one row, and a write of one row costs as much as one of many. Rows wait here, and leave
as runs of consecutive rows. Not thread-safe; the sink holds a lock for each attempt.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Pieces of fewer rows wait for neighbours.
SMALL_ROWS = 8
# What waits at most. With 64 requests in decode and rows of 8 KiB, 16 rows of each come together.
MAX_WAITING_ROWS = 4096
MAX_WAITING_BYTES = 8 << 20


class RowJoiner:
    """Waiting rows of one array of one attempt."""

    def __init__(self) -> None:
        self._places: list[NDArray[np.int64]] = []
        self._rows: list[NDArray[Any]] = []
        self._n_rows = 0
        self.n_bytes = 0

    def add(self, places: NDArray[np.int64], rows: NDArray[Any]) -> int:
        """Keep rows; the array is the joiner's from now on.

        Args:
            places: [n] row of its unit that each goes to.
            rows: [n, width] or [n].

        Returns:
            Their bytes.
        """
        self._places.append(places)
        self._rows.append(rows)
        self._n_rows += len(rows)
        self.n_bytes += rows.nbytes
        return rows.nbytes

    @property
    def is_full(self) -> bool:
        """So much waits that it should be written."""
        return self._n_rows >= MAX_WAITING_ROWS or self.n_bytes >= MAX_WAITING_BYTES

    def drain(self) -> Iterator[tuple[int, NDArray[Any]]]:
        """All rows, joined to runs of consecutive ones, in row order; nothing waits afterwards."""
        if not self._rows:
            return
        places, rows = np.concatenate(self._places), np.concatenate(self._rows)
        self._places, self._rows = [], []
        self._n_rows = self.n_bytes = 0
        order = np.argsort(places, kind="stable")
        places, rows = places[order], rows[order]
        bounds = [0, *(np.flatnonzero(np.diff(places) != 1) + 1).tolist(), len(places)]
        for begin, end in itertools.pairwise(bounds):
            yield int(places[begin]), rows[begin:end]
