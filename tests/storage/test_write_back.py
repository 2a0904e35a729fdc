"""WriteBack: what it asks of the kernel, and that a file is the same with and without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import storage.write_back
from storage.shard import ShardWriter
from storage.write_back import GRAIN_BYTES, MIN_PIECE_BYTES, WriteBack


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(offset, bytes) of each call to the kernel."""
    calls: list[tuple[int, int]] = []
    real = storage.write_back._start

    def start(fd: int, offset: int, n_bytes: int, flags: int) -> int:
        calls.append((offset, n_bytes))
        return real(fd, offset, n_bytes, flags) if real is not None else 0

    monkeypatch.setattr(storage.write_back, "_start", start)
    return calls


def test_it_asks_once_a_grain_for_all_that_was_written_since(asked: list[tuple[int, int]]) -> None:
    watched = WriteBack(-1)
    half = GRAIN_BYTES // 2
    watched.wrote(half, half)
    assert asked == []
    watched.wrote(0, half)
    assert asked == [(0, GRAIN_BYTES)]
    watched.wrote(5 * GRAIN_BYTES, GRAIN_BYTES)
    assert asked[1:] == [(5 * GRAIN_BYTES, GRAIN_BYTES)]


def test_small_pieces_wait_for_fsync(asked: list[tuple[int, int]]) -> None:
    watched = WriteBack(-1)
    for index in range(2 * GRAIN_BYTES // MIN_PIECE_BYTES + 2):
        watched.wrote(index * MIN_PIECE_BYTES, MIN_PIECE_BYTES - 1)
    assert asked == []


def test_every_byte_of_a_shard_is_on_its_way_before_it_is_sealed(folder: Path, asked: list[tuple[int, int]]) -> None:
    width, rows, piece = 1024, 16384, 2048
    writer = ShardWriter(folder / "shard", rows=rows, width=width, dtype="bfloat16", chunk_rows=64)
    data: np.ndarray[Any, Any] = np.random.default_rng(0).integers(1, 255, (rows, 2 * width), np.uint8)
    for start in range(0, rows, piece):
        writer.write_rows(start, data[start : start + piece])
    covered = np.zeros(data.nbytes, np.bool_)
    for offset, n_bytes in asked:
        covered[offset : offset + n_bytes] = True
    assert covered.all()
    writer.seal()
    assert (folder / "shard").read_bytes()[: data.nbytes] == data.tobytes()
