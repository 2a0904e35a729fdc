"""TokenSpill: the token ids of all invokes in one temporary file, lengths and keys in memory.

Packing needs every length before the first unit is known, and units are written in another order than the dataset's. A
flat file that is mapped into memory gives each unit its tokens without holding the dataset in RAM.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray


class TokenSpill:
    """Append all invokes, then read any of them."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="harvest-tokens-")
        self._lengths: list[NDArray[np.int64]] = []
        self._offsets: NDArray[np.int64] | None = None
        self._tokens: NDArray[np.int32] | None = None

    def append(self, lengths: NDArray[np.int64], tokens: NDArray[np.int32]) -> None:
        """Add invokes: their [n] lengths and all their token ids, one after the other."""
        self._lengths.append(np.asarray(lengths, np.int64))
        self._file.write(np.ascontiguousarray(tokens, np.int32).tobytes())

    def close_writing(self) -> NDArray[np.int64]:
        """No more invokes; the lengths [P]."""
        lengths = np.concatenate(self._lengths) if self._lengths else np.zeros(0, np.int64)
        self._offsets = np.concatenate([[0], np.cumsum(lengths)])
        self._file.flush()
        if self._offsets[-1]:
            self._tokens = np.memmap(self._file, np.int32, "r", shape=(int(self._offsets[-1]),))
        else:
            self._tokens = np.zeros(0, np.int32)
        return lengths

    def tokens_of(self, index: int) -> NDArray[np.int32]:
        """Token ids of one invoke."""
        assert self._offsets is not None and self._tokens is not None, "close_writing first"
        return self._tokens[self._offsets[index] : self._offsets[index + 1]]

    def gather(self, indices: Sequence[int] | NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Token ids of several invokes, one after the other, and their [n + 1] offsets."""
        parts = [self.tokens_of(int(index)) for index in indices]
        offsets = np.zeros(len(parts) + 1, np.int32)
        np.cumsum([len(part) for part in parts], out=offsets[1:])
        return (np.concatenate(parts) if parts else np.zeros(0, np.int32)), offsets

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tokens = None
        self._file.close()
