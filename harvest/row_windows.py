"""Rows that a loader holds in memory: windows, read by threads while the one before is handed out."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from harvest.reader import to_torch
from harvest.recycled_memory import RecycledMemory
from harvest.stored_rows import Blocks, Ints, StoredRows
from storage.reader import StoreReader

_READERS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """`values` are [n, width] or [n] by name; `order` [left]: which of them are still to be handed out, and when."""

    values: dict[str, Tensor]
    order: Tensor


class WindowReader:
    """Reads blocks of some arrays of a store into windows of at most `max_rows`.

    A context manager: it owns threads.
    """

    def __init__(self, reader: StoreReader, arrays: Mapping[str, str], *, max_rows: int) -> None:
        self._reader = reader
        self._arrays = arrays
        self._max_rows = max_rows
        self._memory = RecycledMemory(spare=2 * len(arrays))
        self._readers = ThreadPoolExecutor(_READERS)
        self._ahead = ThreadPoolExecutor(1)

    def __enter__(self) -> WindowReader:
        return self

    def __exit__(self, *error: object) -> None:
        self._ahead.shutdown(cancel_futures=True)
        self._readers.shutdown(cancel_futures=True)

    def in_turn(self, calls: Iterable[Callable[[], Window]]) -> Iterator[Window]:
        """Results in order; the next call runs while one result is used."""
        waiting = None
        for call in itertools.chain(calls, [None]):
            begun = None if call is None else self._ahead.submit(call)
            if waiting is not None:
                yield waiting.result()
            waiting = begun

    def read(self, stored: StoredRows, blocks: Blocks, order: Callable[[], Ints]) -> Window:
        """The stored rows of `blocks`; `order()` counts over them."""
        ends = np.cumsum(blocks.counts)
        tensors, values = {}, {}
        for name, path in self._arrays.items():
            spec = self._reader.layout.array(path)
            dtype = to_torch(np.empty(0, spec.native)).dtype
            tensors[name] = self._memory.empty((int(ends[-1]), *spec.shape[1:]), dtype, capacity=self._max_rows)
            values[name] = tensors[name].view(torch.uint8).numpy().view(spec.native)
        parts = zip(blocks.begins.tolist(), blocks.ends.tolist(), blocks.counts.tolist(), ends.tolist(), strict=True)
        jobs = [
            self._readers.submit(self._read_block, stored, path, begin, end, values[name][stop - count : stop])
            for begin, end, count, stop in parts
            for name, path in self._arrays.items()
        ]
        for job in jobs:
            job.result()
        return Window(values=tensors, order=torch.from_numpy(order()))

    def _read_block(self, stored: StoredRows, path: str, begin: int, end: int, out: np.ndarray[Any, Any]) -> None:
        if len(out) == end - begin:
            self._reader.read_into(path, begin, out)
            return
        places = np.empty((end - begin, *out.shape[1:]), out.dtype)
        self._reader.read_into(path, begin, places)
        out[...] = places[stored.mask(begin, end)]


class WaitingRows:
    """Rows in memory, in the order in which they leave it in batches of at most `max_rows`."""

    def __init__(self, *, max_rows: int, spare_batches: int, pin_memory: bool) -> None:
        self._max_rows = max_rows
        # torch recycles pinned memory by itself.
        self._memory = None if pin_memory else RecycledMemory(spare=spare_batches)
        self._windows: deque[Window] = deque()

    def __len__(self) -> int:
        return sum(len(window.order) for window in self._windows)

    def add(self, window: Window, skip: int = 0) -> None:
        """All of a window but its first `skip` rows."""
        self._windows.append(Window(values=window.values, order=window.order[skip:]))

    def take(self, n_rows: int) -> dict[str, Tensor]:
        """The next rows, [n_rows, width] or [n_rows] by name: copies of their own."""
        batch = {
            name: self._empty((n_rows, *values.shape[1:]), values.dtype)
            for name, values in self._windows[0].values.items()
        }
        done = 0
        while done < n_rows:
            window = self._windows.popleft()
            taken, left = window.order[: n_rows - done], window.order[n_rows - done :]
            for name, values in window.values.items():
                torch.index_select(values, 0, taken, out=batch[name][done : done + len(taken)])
            done += len(taken)
            if len(left):
                self._windows.appendleft(Window(values=window.values, order=left))
        return batch

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self._memory is None:
            return torch.empty(shape, dtype=dtype, pin_memory=True)
        return self._memory.empty(shape, dtype, capacity=self._max_rows)

    def release(self) -> None:
        """Keep copies of the few rows that are left, and not the windows that they lie in."""
        for _ in range(len(self._windows)):
            window = self._windows.popleft()
            values = {name: values[window.order] for name, values in window.values.items()}
            self._windows.append(Window(values=values, order=torch.arange(len(window.order))))
