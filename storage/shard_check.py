"""Checks a shard file against its receipt, byte by byte.

Every byte of a shard file is accounted for: chunks by their crc32c, the index by its own, and bytes that no chunk owns
must be zero. So no flipped bit goes unseen, and the damaged chunk is named by its rows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numcodecs.zstd import Zstd

from storage.checksum import crc32c
from storage.files import pread_into
from storage.format import ArraySpec
from storage.receipt import FileReceipt
from storage.shard import MISSING

_BLOCK_BYTES = 8 << 20
RowsTaker = Callable[[int, "np.ndarray[Any, Any]"], None]


def shard_problems(path: Path, spec: ArraySpec, receipt: FileReceipt, take: RowsTaker | None = None) -> Iterator[str]:
    """What is wrong with the file at `path`, one sentence each; nothing when it is what was written.

    `take` is handed every sound chunk as (first row in the shard, uint8 [chunk_rows, row_bytes]).
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield "the file is missing"
        return
    except OSError as error:
        yield f"the file cannot be opened ({error.strerror})"
        return
    try:
        yield from _open_problems(fd, spec, receipt, take)
    except OSError as error:
        yield f"the file cannot be read ({error.strerror})"
    finally:
        os.close(fd)


def _open_problems(fd: int, spec: ArraySpec, receipt: FileReceipt, take: RowsTaker | None) -> Iterator[str]:
    assert spec.shards is not None
    size = os.fstat(fd).st_size
    if size != receipt.file_bytes:
        yield f"it has {size} bytes instead of {receipt.file_bytes}"
        return
    n_chunks = spec.shards[0] // spec.chunks[0]
    raw = np.empty(16 * n_chunks + 4, np.uint8)
    end = size - len(raw)
    if end < 0 or pread_into(fd, raw, end) != len(raw):
        yield "it is too short to hold an index"
        return
    if crc32c(raw[:-4]) != receipt.index_crc or raw[-4:].tobytes() != receipt.index_crc.to_bytes(4, "little"):
        yield "its index is damaged"
        return
    index = raw[:-4].view("<u8").reshape(n_chunks, 2).tolist()
    position = 0
    for chunk in sorted(range(n_chunks), key=lambda chunk: index[chunk][0]):
        offset, length = index[chunk]
        if (offset == MISSING) != (receipt.chunk_crcs[chunk] is None):
            yield f"{_rows(spec, chunk)} are there or absent against the receipt"
        if offset == MISSING:
            continue
        if offset > position and not _zero(fd, position, offset):
            yield f"bytes {position} to {offset - 1}, which belong to no rows, are not zero"
        position = max(position, offset + length)
        stored = np.empty(length, np.uint8)
        if pread_into(fd, stored, offset) != length or crc32c(stored) != receipt.chunk_crcs[chunk]:
            yield f"{_rows(spec, chunk)} are damaged"
        elif take is not None:
            whole = stored if spec.compression is None else np.frombuffer(Zstd(level=1).decode(stored), np.uint8)
            take(chunk * spec.chunks[0], whole.reshape(spec.chunks[0], spec.row_bytes))
    if position < end and not _zero(fd, position, end):
        yield f"bytes {position} to {end - 1}, which belong to no rows, are not zero"


def _rows(spec: ArraySpec, chunk: int) -> str:
    return f"rows {chunk * spec.chunks[0]} to {(chunk + 1) * spec.chunks[0] - 1} of the shard"


def _zero(fd: int, start: int, stop: int) -> bool:
    while start < stop:
        block = np.empty(min(_BLOCK_BYTES, stop - start), np.uint8)
        if pread_into(fd, block, start) != len(block) or block.any():
            return False
        start += len(block)
    return True
