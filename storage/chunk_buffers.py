"""Gathers the rows of inner chunks that must be whole before they can be written.

Three kinds of shard need it: compressed ones (a chunk is encoded at once), ones written with O_DIRECT (the kernel wants
aligned buffers, offsets and lengths) and labels, whose unwritten rows hold a fill value other than zero. A chunk leaves
memory as soon as its last row is there. Should the incomplete chunks of one shard outgrow `MAX_OPEN_BYTES`, the oldest
is parked in a scratch file beside the shard and fetched again for its next row.
"""

from __future__ import annotations

import mmap
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
from numcodecs.zstd import Zstd

from storage.checksum import crc32c
from storage.files import pread_into, pwrite_all
from storage.format import Compression

MAX_OPEN_BYTES = 32 << 20
"""Most memory that the incomplete chunks of one shard take."""
ALIGNMENT = 4096
"""What O_DIRECT asks of buffers, offsets and lengths on every common file system."""

_Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class ChunkBuffers:
    """The incomplete chunks of one shard file, open at descriptor `fd`.

    `row` is the fill row as bytes. `stored` maps a finished chunk to (offset, length, crc32c) in the file.
    """

    def __init__(
        self, *, path: Path, fd: int, row: _Bytes, chunk_rows: int, compression: Compression | None, direct: bool
    ) -> None:
        self.stored: dict[int, tuple[int, int, int]] = {}
        self._path = path
        self._fd = fd
        self._row = row
        self._chunk_rows = chunk_rows
        self._chunk_bytes = chunk_rows * len(row)
        self._codec = Zstd(level=1) if compression == "zstd" else None
        self._end = 0
        self._lock = threading.Lock()
        self._open: dict[int, _Bytes] = {}
        self._filled: dict[int, int] = {}
        self._parked: set[int] = set()
        self._free: list[_Bytes] = []
        self._scratch = -1
        self._direct = -1
        if direct and self._codec is None and self._chunk_bytes % ALIGNMENT == 0:
            self._direct = self._open_direct()

    @property
    def direct(self) -> bool:
        """Whether chunks bypass the page cache; False where the geometry or the file system forbids it."""
        return self._direct >= 0

    def write(self, row: int, data: _Bytes) -> None:
        """Take `data` (uint8 [n, row_bytes]) for rows `row ..`; write out every chunk that becomes whole."""
        done = 0
        while done < len(data):
            chunk, first = divmod(row + done, self._chunk_rows)
            n = min(self._chunk_rows - first, len(data) - done)
            piece = data[done : done + n]
            done += n
            if n == self._chunk_rows and not self.direct:
                self._put(chunk, piece.reshape(-1))
                continue
            with self._lock:
                buffer = self._buffer(chunk)
                buffer[first : first + n] = piece
                self._filled[chunk] = self._filled.get(chunk, 0) + n
                whole = self._filled[chunk] == self._chunk_rows
                if whole:
                    del self._open[chunk]
            if whole:
                self._put(chunk, buffer.reshape(-1))
                self._recycle(buffer)

    def clear(self, row: int, n: int) -> None:
        """Give rows `row .. row+n-1` back; a chunk that was written out is opened again."""
        with self._lock:
            for at in range(row, row + n):
                chunk, first = divmod(at, self._chunk_rows)
                if chunk in self.stored:
                    self._reopen(chunk)
                self._buffer(chunk)[first] = self._row
                self._filled[chunk] -= 1

    def flush(self, present: np.ndarray[Any, Any]) -> int:
        """Write every incomplete chunk that `present` (bool [chunks]) names; return the end of the chunks in the
        file.
        """
        for chunk in sorted({*self._open, *self._parked}):
            if present[chunk]:
                self._put(chunk, self._buffer(chunk).reshape(-1))
            self._open.pop(chunk, None)
        return max((offset + length for offset, length, _ in self.stored.values()), default=0)

    def close(self) -> None:
        """Free descriptors and buffers."""
        for name in ("_scratch", "_direct"):
            fd = getattr(self, name)
            setattr(self, name, -1)
            if fd >= 0:
                os.close(fd)
        self._open.clear()
        self._free.clear()

    def _put(self, chunk: int, data: _Bytes) -> None:
        """Write a whole chunk; places of compressed chunks are given in the order of completion."""
        if self._codec is None:
            offset = chunk * self._chunk_bytes
            stored: Any = data
            pwrite_all(self._direct if self.direct else self._fd, data, offset)
        else:
            stored = self._codec.encode(data)
            with self._lock:
                offset = self._end
                self._end += len(stored)
            pwrite_all(self._fd, stored, offset)
        with self._lock:
            self.stored[chunk] = (offset, len(stored), crc32c(bytes(stored) if self._codec else stored))

    def _buffer(self, chunk: int) -> _Bytes:
        """The buffer of an incomplete chunk, made, fetched or at hand."""
        buffer = self._open.pop(chunk, None)
        if buffer is None:
            while self._open and (len(self._open) + 1) * self._chunk_bytes > MAX_OPEN_BYTES:
                self._park(next(iter(self._open)))
            buffer = self._free.pop() if self._free else self._aligned()
            if chunk in self._parked:
                pread_into(self._scratch, buffer, chunk * self._chunk_bytes)
                self._parked.discard(chunk)
            else:
                buffer[...] = self._row
        self._open[chunk] = buffer
        return buffer

    def _aligned(self) -> _Bytes:
        memory = np.frombuffer(mmap.mmap(-1, self._chunk_bytes), np.uint8)
        return memory.reshape(self._chunk_rows, len(self._row))

    def _recycle(self, buffer: _Bytes) -> None:
        with self._lock:
            if len(self._free) < 4:
                self._free.append(buffer)

    def _park(self, chunk: int) -> None:
        if self._scratch < 0:
            path = self._path.with_name(self._path.name + ".scratch")
            self._scratch = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
            os.unlink(path)
        buffer = self._open.pop(chunk)
        pwrite_all(self._scratch, buffer, chunk * self._chunk_bytes)
        self._parked.add(chunk)
        if len(self._free) < 4:
            self._free.append(buffer)

    def _reopen(self, chunk: int) -> None:
        offset, length, _ = self.stored.pop(chunk)
        data = np.empty(length, np.uint8)
        pread_into(self._fd, data, offset)
        # Bytes that no index entry names must be zero, so that a damaged byte shows wherever it lies.
        pwrite_all(self._fd, bytes(length), offset)
        buffer = self._buffer(chunk)
        whole = data if self._codec is None else np.frombuffer(self._codec.decode(data), np.uint8)
        buffer[...] = whole.reshape(buffer.shape)
        self._filled[chunk] = self._chunk_rows

    def _open_direct(self) -> int:
        try:
            return os.open(self._path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
        except OSError:
            return -1
