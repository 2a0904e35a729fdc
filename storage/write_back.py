"""Starts the way to the disk of what has been written, so that `fsync` finds little left to do.

The kernel keeps written pages in memory for up to half a minute. A unit's last fsync would then wait for all of its
bytes while nothing is left to compute. Nothing here makes data durable: that is `fsync`'s work alone.
"""

from __future__ import annotations

import ctypes
import threading

GRAIN_BYTES = 8 << 20
"""Bytes written between two calls: large enough that a disk takes them at full speed."""
MIN_PIECE_BYTES = 64 << 10
"""Smaller pieces share pages with their neighbours, which would go to the disk once for each of them."""
_WRITE = 2  # SYNC_FILE_RANGE_WRITE: start writing dirty pages, wait for none

_start = getattr(ctypes.CDLL(None), "sync_file_range", None)
if _start is not None:
    _start.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]


class WriteBack:
    """Watches the writes to one file, open at descriptor `fd`. Thread-safe."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()
        self._reset()

    def _reset(self) -> None:
        self._n_bytes, self._begin, self._end = 0, 1 << 62, 0

    def wrote(self, offset: int, n_bytes: int) -> None:
        """Count a piece that has been written; now and then, start the write-back of those since the last time."""
        if n_bytes < MIN_PIECE_BYTES or _start is None:
            return
        with self._lock:
            self._n_bytes += n_bytes
            self._begin = min(self._begin, offset)
            self._end = max(self._end, offset + n_bytes)
            if self._n_bytes < GRAIN_BYTES:
                return
            begin, end = self._begin, self._end
            self._reset()
        # A hint: where the file system does not know it, fsync does all the work.
        _start(self._fd, begin, end - begin, _WRITE)
