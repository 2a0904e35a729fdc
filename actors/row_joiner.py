"""RowJoiner: gathers small pieces of rows until consecutive ones can be written together.

A decode step gives each request one row, and a write of one row costs as much as one of many. Pieces wait here, and
leave as runs of consecutive rows. Not thread-safe; the sink holds a lock for each attempt.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Pieces of fewer rows wait for neighbours.
SMALL_ROWS = 8
# Rows of one array that wait at most. With 64 requests in decode, eight rows of each come together.
MAX_WAITING_ROWS = 512


class RowJoiner:
    """Waiting pieces of one array of one attempt."""

    def __init__(self) -> None:
        self._pieces: list[tuple[int, NDArray[Any]]] = []
        self.n_rows = 0
        self.n_bytes = 0

    def add(self, row: int, piece: NDArray[Any]) -> None:
        """Keep a copy of a piece whose first row is `row` of its unit."""
        self._pieces.append((row, piece.copy()))
        self.n_rows += len(piece)
        self.n_bytes += piece.nbytes

    def drain(self) -> Iterator[tuple[int, NDArray[Any]]]:
        """All pieces, joined to runs of consecutive rows, in row order; nothing waits afterwards."""
        pieces = sorted(self._pieces, key=lambda piece: piece[0])
        self._pieces = []
        self.n_rows = self.n_bytes = 0
        run: list[NDArray[Any]] = []
        first = 0
        end = -1
        for row, piece in pieces:
            if row != end and run:
                yield first, np.concatenate(run)
                run = []
            if not run:
                first = row
            run.append(piece)
            end = row + len(piece)
        if run:
            yield first, np.concatenate(run)
