"""Host memory for tensors that is used again as soon as nothing refers to them.

New memory is mapped page by page when it is first written, which takes several times as long as copying rows into it.
A tensor from here is its holder's alone, as any other: its memory comes back when the last view of it is gone.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class RecycledMemory:
    """At most `spare` pieces of each size lie ready; what comes back beyond them is freed."""

    def __init__(self, *, spare: int) -> None:
        self._spare = spare
        self._free: defaultdict[int, list[NDArray[np.uint8]]] = defaultdict(list)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, *, capacity: int) -> Tensor:
        """An uninitialised tensor of at most `capacity` rows, in a piece of memory that has room for so many."""
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        free = self._free[capacity * row_bytes]
        try:
            piece = free.pop()
        except IndexError:
            piece = np.empty(capacity * row_bytes, np.uint8)
        # torch holds this very object as long as any tensor uses its memory.
        lent = piece[: shape[0] * row_bytes]
        weakref.finalize(lent, self._take_back, free, piece).atexit = False
        return torch.from_numpy(lent).view(dtype).view(shape)

    def _take_back(self, free: list[NDArray[np.uint8]], piece: NDArray[np.uint8]) -> None:
        if len(free) < self._spare:
            free.append(piece)
