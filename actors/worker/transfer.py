"""Transfer: device rows to host memory, without a wait on the forward's path.

On a GPU a side stream copies into pinned memory and a writer thread waits for the event; on a CPU the rows are already
there. The device rows are held until the copy is done, so their memory cannot be reused before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.host_rows import ArrayRows


class _CopiedRows:
    """Rows of a device tensor on their way into pinned memory."""

    def __init__(
        self,
        device_rows: Tensor,
        host_rows: Tensor,
        done: torch.cuda.Event,
        measure: Callable[[], None] | None = None,
    ) -> None:
        self._device_rows: Tensor | None = device_rows
        self._host_rows = host_rows
        self._done = done
        self._measure = measure
        self.n_bytes = host_rows.nbytes

    def wait(self) -> NDArray[Any]:
        """Block until the copy has ended."""
        self._done.synchronize()
        if self._measure is not None:
            self._measure()
            self._measure = None
        self._device_rows = None
        return as_numpy(self._host_rows)


class Transfer:
    """Starts copies of one device; `timed` measures them with events, which the thread that waits for a copy reads."""

    def __init__(self, device: torch.device, *, timed: bool = False) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._timed = timed
        self._lock = threading.Lock()
        self.copy_s = 0.0
        """Seconds that finished copies took, where they are timed."""

    def start(self, rows: list[Tensor]) -> list[ArrayRows | _CopiedRows]:
        """Begin to bring device rows to host memory, in order."""
        stream = self._stream
        if stream is None:
            return [ArrayRows(as_numpy(tensor)) for tensor in rows]
        started: list[ArrayRows | _CopiedRows] = []
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for tensor in rows:
                host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                begun = torch.cuda.Event(enable_timing=True) if self._timed else None
                if begun is not None:
                    begun.record(stream)
                host.copy_(tensor, non_blocking=True)
                done = torch.cuda.Event(enable_timing=self._timed)
                done.record(stream)
                measure = partial(self._count, begun, done) if begun is not None else None
                started.append(_CopiedRows(tensor, host, done, measure))
        return started

    def _count(self, begun: Any, done: Any) -> None:
        seconds = begun.elapsed_time(done) / 1e3
        with self._lock:
            self.copy_s += seconds


def as_numpy(rows: Tensor) -> NDArray[Any]:
    """A host tensor as numpy without a copy; bfloat16 as its uint16 bits."""
    if rows.dtype == torch.bfloat16:
        return rows.view(torch.int16).numpy().view(np.uint16)
    return rows.numpy()
