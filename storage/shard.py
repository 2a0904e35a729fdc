"""Writes one Zarr shard: rows at planned places, in any order, from several threads.

A shard file is its inner chunks, then the index (offset and length of each chunk as little-endian uint64 pairs,
2^64-1 for a chunk that is all holes), then the index's crc32c. Uncompressed chunks lie at `chunk number x chunk
bytes`, so rows are written straight to their place and nothing of the size of a shard is ever held. Chunks that must
be whole before they can be written (compressed, O_DIRECT, a fill value other than zero) are gathered by
`ChunkBuffers`.

Invariants: a row is written at most once; the receipt's crc32c of a chunk is that of the bytes given, not of bytes read
back; after an error or `abort` no call succeeds.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from storage.checksum import crc32c, mask_crc32c, row_checksum
from storage.chunk_buffers import ChunkBuffers
from storage.errors import RowError, StorageError, write_error, writing
from storage.files import pread_into, pwrite_all
from storage.format import Compression, numpy_dtype
from storage.overlap import beside
from storage.write_back import WriteBack

_PIECE_BYTES = 256 << 10
MISSING = 2**64 - 1
"""Offset and length, in a shard's index, of a chunk that is not there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardReceipt:
    """What was written: file size in bytes, rows, crc32c of each chunk as stored, of the index and of the row mask.

    `chunk_crcs` holds one value a chunk, None where the chunk is absent. `mask_crc` is the crc32c of the rows written
    as bits, first row in the highest bit of the first byte.
    """

    file_bytes: int
    rows: int
    chunk_crcs: tuple[int | None, ...]
    index_crc: int
    mask_crc: int


class ShardWriter:
    """Writer of the shard at `path`: `rows` rows of `width` values of `dtype`, in chunks of `chunk_rows` rows.

    `dtype` is a Zarr data type name. `compression` is None or "zstd" (level 1). `direct` bypasses the page cache where
    the geometry allows (chunk bytes a multiple of 4096) and the file system does. `fill` is the value of unwritten rows
    of a chunk that has written ones. Thread-safe.
    """

    def __init__(
        self,
        path: Path,
        *,
        rows: int,
        width: int,
        dtype: str,
        chunk_rows: int,
        compression: Compression | None = None,
        direct: bool = False,
        fill: int | float = 0,
    ) -> None:
        self.path = path
        self.rows = rows
        self.row_bytes = width * numpy_dtype(dtype).itemsize
        self.chunk_rows = chunk_rows
        self.chunk_bytes = chunk_rows * self.row_bytes
        self.n_chunks = rows // chunk_rows
        self._mask = np.zeros(rows, np.bool_)
        self._changed = threading.Condition()
        self._busy = 0
        self._closed = ""
        with writing(path, "creating"):
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._sums_lock = threading.Lock()
        self._sums: list[int] = [0] * self.n_chunks
        self._checksum = row_checksum(self.row_bytes, chunk_rows)
        self._write_back = WriteBack(self._fd)
        self._buffers: ChunkBuffers | None = None
        if compression is not None or direct or fill != 0:
            row = np.full(width, fill, numpy_dtype(dtype)).view(np.uint8)
            self._buffers = ChunkBuffers(
                path=path, fd=self._fd, row=row, chunk_rows=chunk_rows, compression=compression, direct=direct
            )

    def write_rows(
        self, row: int, data: np.ndarray[Any, Any], also: Callable[[int, np.ndarray[Any, Any]], None] | None = None
    ) -> None:
        """Store `data` (uint8 [n, row_bytes], C-contiguous) as rows `row .. row+n-1` of the shard.

        `also` is called with pieces of `data`, each with its first row within `data`, once the rows are known to be
        new; large data is handed to it beside the write.

        Raises `RowError` for a row that is out of range or written already, `WriteError` when the disk refuses.
        """
        n = len(data)
        with self._changed:
            self._check_open()
            if row < 0 or row + n > self.rows:
                raise RowError(f"Rows {row} to {row + n - 1} are outside the shard {self.path} of {self.rows} rows.")
            claimed = self._mask[row : row + n]
            if claimed.any():
                first = row + int(np.argmax(claimed))
                raise RowError(f"Row {first} of {self.path} is written already; each row is written once.")
            claimed[...] = True
            self._busy += 1
        try:
            wait = beside(self._arithmetic, row, data, also, size_bytes=data.nbytes)
            try:
                self._store(row, data)
            finally:
                wait()
        except OSError as error:
            raise self._fail(write_error(error, self.path, "writing")) from error
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self._release()

    def clear_rows(self, row: int, n: int) -> None:
        """Make written rows `row .. row+n-1` holes again; `RowError` where one was not written."""
        with self._changed:
            self._check_open()
            if row < 0 or n < 0 or row + n > self.rows or not self._mask[row : row + n].all():
                raise RowError(f"Rows {row} to {row + n - 1} of {self.path} are not all written; nothing to clear.")
            while self._busy:
                self._changed.wait()
            self._check_open()
            try:
                self._erase(row, n)
            except OSError as error:
                raise self._fail(write_error(error, self.path, "clearing rows of")) from error
            self._mask[row : row + n] = False

    @property
    def written(self) -> int:
        """Rows written and not cleared."""
        return int(np.count_nonzero(self._mask))

    def mask(self) -> np.ndarray[Any, Any]:
        """Which rows are written, bool [rows]; a copy."""
        return self._mask.copy()

    def seal(self, *, fsync: bool = True) -> ShardReceipt:
        """Write the index, make the file durable (unless `fsync` is False), close it, and say what it holds."""
        with self._changed:
            self._check_open()
            self._closed = "sealed"
            while self._busy:
                self._changed.wait()
            if self._closed != "sealed":
                raise StorageError(f"The shard {self.path} failed while it was being sealed: {self._closed}.")
            try:
                return self._write_index(fsync=fsync)
            except OSError as error:
                raise self._fail(write_error(error, self.path, "sealing")) from error
            finally:
                self._close()

    def abort(self) -> None:
        """Drop the file; harmless after `seal` or `abort`."""
        with self._changed:
            if self._fd < 0:
                return
            self._closed = "aborted"
            while self._busy:
                self._changed.wait()
            self._close()
            self.path.unlink(missing_ok=True)

    def _check_open(self) -> None:
        if self._closed:
            raise StorageError(f"The shard {self.path} takes no more rows: {self._closed}.")

    def _fail(self, error: BaseException) -> BaseException:
        self._closed = f"an earlier write failed ({error})"
        return error

    def _release(self) -> None:
        with self._changed:
            self._busy -= 1
            if not self._busy:
                self._changed.notify_all()

    def _close(self) -> None:
        if self._buffers is not None:
            self._buffers.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _store(self, row: int, data: np.ndarray[Any, Any]) -> None:
        if self._buffers is not None:
            self._buffers.write(row, data)
        else:
            pwrite_all(self._fd, data, row * self.row_bytes)
            self._write_back.wrote(row * self.row_bytes, data.nbytes)

    def _arithmetic(
        self, row: int, data: np.ndarray[Any, Any], also: Callable[[int, np.ndarray[Any, Any]], None] | None
    ) -> None:
        """Sums and statistics, in pieces that stay in the processor's cache from one to the next."""
        step = max(1, _PIECE_BYTES // self.chunk_bytes) * self.chunk_rows
        done = 0
        while done < len(data):
            n = min(step - (row + done) % self.chunk_rows, len(data) - done)
            piece = data[done : done + n]
            if self._buffers is None:
                self._add(row + done, piece)
            if also is not None:
                also(done, piece)
            done += n

    def _add(self, row: int, data: np.ndarray[Any, Any]) -> None:
        """Add `data` to the sums of the chunks it touches (adding it again takes it out)."""
        sums: list[tuple[int, int]] = []
        done = 0
        while done < len(data):
            chunk, first = divmod(row + done, self.chunk_rows)
            n = min(self.chunk_rows - first, len(data) - done)
            sums.append((chunk, self._checksum.contribution(data[done : done + n], first)))
            done += n
        with self._sums_lock:
            for chunk, value in sums:
                self._sums[chunk] ^= value

    def _erase(self, row: int, n: int) -> None:
        if self._buffers is not None:
            self._buffers.clear(row, n)
            return
        old = np.empty((n, self.row_bytes), np.uint8)
        pread_into(self._fd, old, row * self.row_bytes)
        self._add(row, old)
        pwrite_all(self._fd, bytes(n * self.row_bytes), row * self.row_bytes)

    def _write_index(self, *, fsync: bool) -> ShardReceipt:
        present: np.ndarray[Any, Any] = np.any(self._mask.reshape(self.n_chunks, self.chunk_rows), axis=1)
        index = np.full((self.n_chunks, 2), MISSING, "<u8")
        crcs: list[int | None] = [None] * self.n_chunks
        if self._buffers is not None:
            end = self._buffers.flush(present)
            for chunk, (offset, length, crc) in self._buffers.stored.items():
                if present[chunk]:
                    index[chunk] = offset, length
                    crcs[chunk] = crc
        else:
            chunks = np.flatnonzero(present)
            index[chunks, 0] = chunks * self.chunk_bytes
            index[chunks, 1] = self.chunk_bytes
            end = (int(chunks[-1]) + 1) * self.chunk_bytes if len(chunks) else 0
            for chunk in chunks.tolist():
                crcs[chunk] = self._checksum.finish(self._sums[chunk])
        index_crc = crc32c(index)
        os.ftruncate(self._fd, end)
        pwrite_all(self._fd, index.tobytes() + index_crc.to_bytes(4, "little"), end)
        if fsync:
            os.fsync(self._fd)
        return ShardReceipt(
            file_bytes=end + index.nbytes + 4,
            rows=self.written,
            chunk_crcs=tuple(crcs),
            index_crc=index_crc,
            mask_crc=mask_crc32c(self._mask),
        )
