"""crc32c of a chunk whose rows arrive in any order, without reading anything back.

crc32c is affine: the plain (uninverted) remainder of a message is the exclusive-or of the remainders of its parts, each
carried over the bytes that follow it. A row that was never written is zero bytes and adds nothing, so a running sum a
chunk, begun at zero, ends as the chunk's remainder whatever the order. Rows that are taken back are summed once more.
"""

from __future__ import annotations

import threading
from functools import lru_cache
from typing import Any

import google_crc32c
import numpy as np

_ALL = 0xFFFFFFFF


def crc32c(data: Any) -> int:
    """Standard crc32c of a contiguous array or bytes."""
    return int(google_crc32c.value(data))


def mask_crc32c(mask: np.ndarray[Any, Any]) -> int:
    """crc32c of a row mask (bool [rows]) as bits, first row in the highest bit of the first byte."""
    return crc32c(np.packbits(mask))


class RowChecksum:
    """Remainders of row blocks inside chunks of `chunk_rows` rows of `row_bytes` bytes. Shareable by threads."""

    def __init__(self, row_bytes: int, chunk_rows: int) -> None:
        self.row_bytes = row_bytes
        self.chunk_rows = chunk_rows
        self._zero_row = bytes(row_bytes)
        self._of_zeros = [0]
        for _ in range(chunk_rows):
            self._of_zeros.append(google_crc32c.extend(self._of_zeros[-1], self._zero_row))
        self._columns: list[list[int]] = [[1 << bit for bit in range(32)]]
        self._tables: dict[int, list[list[int]]] = {}
        self._lock = threading.Lock()

    def remainder(self, rows: np.ndarray[Any, Any]) -> int:
        """Plain remainder of `rows` (uint8 [n, row_bytes], contiguous), as if they were a whole message."""
        return int(google_crc32c.value(rows)) ^ self._of_zeros[len(rows)]

    def contribution(self, rows: np.ndarray[Any, Any], first: int) -> int:
        """What `rows`, lying at row `first` of a chunk, add (exclusive-or) to the chunk's sum."""
        after = self.chunk_rows - first - len(rows)
        value = self.remainder(rows)
        if after == 0 or value == 0:
            return value
        table = self._tables.get(after)
        if table is None:
            with self._lock:
                table = self._tables.setdefault(after, self._table(after))
        low, second, third, high = table
        return low[value & 255] ^ second[value >> 8 & 255] ^ third[value >> 16 & 255] ^ high[value >> 24]

    def finish(self, total: int) -> int:
        """Standard crc32c of the whole chunk from its sum."""
        return total ^ self._of_zeros[self.chunk_rows]

    def _table(self, rows: int) -> list[list[int]]:
        """Tables, one a byte of the remainder, that carry it over `rows` zero rows."""
        columns = np.array(self._column(rows), np.uint32)
        bits = (np.arange(256)[:, None] >> np.arange(8)) & 1
        return [
            np.bitwise_xor.reduce(
                np.where(bits, columns[8 * byte : 8 * byte + 8], 0).astype(np.uint32), axis=1
            ).tolist()
            for byte in range(4)
        ]

    def _column(self, rows: int) -> list[int]:
        while len(self._columns) <= rows:
            longer = [_ALL ^ google_crc32c.extend(_ALL ^ x, self._zero_row) for x in self._columns[-1]]
            self._columns.append(longer)
        return self._columns[rows]


@lru_cache(maxsize=256)
def row_checksum(row_bytes: int, chunk_rows: int) -> RowChecksum:
    """The shared `RowChecksum` of one geometry."""
    return RowChecksum(row_bytes, chunk_rows)
