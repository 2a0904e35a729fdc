"""Shards: any order of rows, every encoding, read back by zarr-python, tensorstore and by the index itself."""

from __future__ import annotations

import itertools
import shutil
import threading
from pathlib import Path
from typing import Any

import hypothesis
import ml_dtypes
import numpy as np
import pytest
import tensorstore
import zarr
from hypothesis import strategies as st

import storage.chunk_buffers
from storage.checksum import crc32c, mask_crc32c, row_checksum
from storage.errors import RowError, StorageError
from storage.format import LocationSpec, StoreLayout
from storage.shard import MISSING, ShardWriter

ROWS, CHUNK_ROWS = 256, 32


def make_array(folder: Path, *, width: int, dtype: Any, compression: Any) -> Path:
    """A one-shard Zarr array without its shard; returns the shard's path."""
    layout = StoreLayout(
        locations=(LocationSpec(name="x", path="x", width=width, dtype=dtype),),
        rows_per_shard=ROWS,
        shards_per_unit=1,
        n_units=1,
        n_invokes=1,
        chunk_rows=CHUNK_ROWS,
        compression=compression,
    )
    folder.mkdir(parents=True)
    (folder / "zarr.json").write_bytes(layout.arrays["acts/x"].document())
    return folder / "c.0.0"


@st.composite
def pieces(draw: st.DrawFn) -> list[tuple[int, int, bool]]:
    """Disjoint (start, stop, cleared afterwards) in any order; some rows are in none of them."""
    cuts = sorted({0, ROWS, *draw(st.lists(st.integers(1, ROWS - 1), max_size=12))})
    spans = [(a, b) for a, b in itertools.pairwise(cuts) if draw(st.integers(0, 4))]
    return [(a, b, draw(st.integers(0, 5)) == 0) for a, b in draw(st.permutations(spans))]


@hypothesis.settings(
    deadline=None, max_examples=60, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
@hypothesis.given(
    pieces=pieces(),
    encoding=st.sampled_from([(None, False), ("zstd", False), (None, True)]),
    dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
    width=st.sampled_from([1, 24, 64]),
    small_memory=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_any_order_reads_back(
    folder: Path, pieces: Any, encoding: Any, dtype: Any, width: int, small_memory: bool, seed: int
) -> None:
    compression, direct = encoding
    shutil.rmtree(folder / "x", ignore_errors=True)
    path = make_array(folder / "x", width=width, dtype=dtype, compression=compression)
    native = np.dtype(ml_dtypes.bfloat16) if dtype == "bfloat16" else np.dtype(dtype)
    values = np.random.default_rng(seed).integers(1, 256, (ROWS, width * native.itemsize), np.uint8)
    expected = np.zeros_like(values)
    mask = np.zeros(ROWS, np.bool_)
    limit = CHUNK_ROWS * values.shape[1] * 2 if small_memory else storage.chunk_buffers.MAX_OPEN_BYTES
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage.chunk_buffers, "MAX_OPEN_BYTES", limit)
        writer = ShardWriter(
            path, rows=ROWS, width=width, dtype=dtype, chunk_rows=CHUNK_ROWS, compression=compression, direct=direct
        )
        for start, stop, _ in pieces:
            writer.write_rows(start, values[start:stop])
            expected[start:stop], mask[start:stop] = values[start:stop], True
        for start, stop, cleared in pieces:
            if cleared:
                writer.clear_rows(start, stop - start)
                expected[start:stop], mask[start:stop] = 0, False
        assert writer.written == mask.sum()
        receipt = writer.seal()
    raw = path.read_bytes()
    assert (len(raw), int(mask.sum())) == (receipt.file_bytes, receipt.rows)
    assert receipt.mask_crc == mask_crc32c(mask)
    n_chunks = ROWS // CHUNK_ROWS
    index_bytes = raw[-4 - 16 * n_chunks : -4]
    assert crc32c(index_bytes) == receipt.index_crc == int.from_bytes(raw[-4:], "little")
    owned = np.zeros(len(raw), np.bool_)
    owned[len(raw) - len(index_bytes) - 4 :] = True
    for chunk, (offset, length) in enumerate(np.frombuffer(index_bytes, "<u8").reshape(n_chunks, 2).tolist()):
        present = mask[chunk * CHUNK_ROWS : (chunk + 1) * CHUNK_ROWS].any()
        assert (offset != MISSING) == present
        if present:
            assert crc32c(raw[offset : offset + length]) == receipt.chunk_crcs[chunk]
            assert not owned[offset : offset + length].any()
            owned[offset : offset + length] = True
    assert not np.frombuffer(raw, np.uint8)[~owned].any()
    by_zarr = np.asarray(zarr.open_array(folder / "x", mode="r")[:])
    assert by_zarr.view(np.uint8).reshape(expected.shape).tobytes() == expected.tobytes()
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(folder / "x")}}
    by_tensorstore = tensorstore.open(spec, read=True).result().read().result()
    assert np.ascontiguousarray(by_tensorstore).tobytes() == expected.tobytes()


@hypothesis.given(st.lists(st.integers(1, 63), max_size=8), st.integers(1, 40), st.randoms())
def test_checksum_of_rows_in_any_order(cuts: list[int], row_bytes: int, rng: Any) -> None:
    rows = np.frombuffer(rng.randbytes(64 * row_bytes), np.uint8).reshape(64, row_bytes)
    checksum = row_checksum(row_bytes, 64)
    edges = sorted({0, 64, *cuts})
    spans = list(itertools.pairwise(edges))
    rng.shuffle(spans)
    total = 0
    for start, stop in spans:
        total ^= checksum.contribution(rows[start:stop], start)
    assert checksum.finish(total) == crc32c(rows)


def writer_at(folder: Path, **options: Any) -> ShardWriter:
    return ShardWriter(folder / "shard", rows=128, width=4, dtype="float32", chunk_rows=32, **options)


def rows(n: int, value: int = 1) -> np.ndarray[Any, Any]:
    return np.full((n, 16), value, np.uint8)


def test_a_row_written_twice_is_refused_and_changes_nothing(folder: Path) -> None:
    writer = writer_at(folder)
    writer.write_rows(10, rows(5, 1))
    with pytest.raises(RowError, match="Row 12 of .* is written already"):
        writer.write_rows(12, rows(4, 2))
    assert writer.written == 5
    writer.seal()
    assert (folder / "shard").read_bytes()[160:240] == b"\1" * 80


@pytest.mark.parametrize(("row", "n"), [(-1, 1), (128, 1), (120, 9)])
def test_rows_out_of_range_are_refused(folder: Path, row: int, n: int) -> None:
    writer = writer_at(folder)
    with pytest.raises(RowError, match="outside the shard"):
        writer.write_rows(row, rows(n))
    writer.abort()


def test_clearing_rows_that_are_not_there_is_refused(folder: Path) -> None:
    writer = writer_at(folder)
    writer.write_rows(0, rows(2))
    with pytest.raises(RowError, match="not all written"):
        writer.clear_rows(1, 2)
    writer.clear_rows(0, 2)
    assert writer.seal().rows == 0


def test_a_sealed_or_aborted_shard_takes_no_rows(folder: Path) -> None:
    writer = writer_at(folder)
    writer.seal()
    with pytest.raises(StorageError, match="takes no more rows: sealed"):
        writer.write_rows(0, rows(1))
    writer.abort()
    assert (folder / "shard").exists()
    other = ShardWriter(folder / "other", rows=128, width=4, dtype="float32", chunk_rows=32)
    other.abort()
    assert not (folder / "other").exists()
    with pytest.raises(StorageError, match="aborted"):
        other.seal()


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_many_threads_write_one_shard(folder: Path, compression: Any) -> None:
    path = make_array(folder / "x", width=64, dtype="float32", compression=compression)
    writer = ShardWriter(path, rows=ROWS, width=64, dtype="float32", chunk_rows=CHUNK_ROWS, compression=compression)
    values = np.random.default_rng(0).standard_normal((ROWS, 64), np.float32)
    order = np.random.default_rng(1).permutation(ROWS)

    def work(mine: list[int]) -> None:
        for row in mine:
            writer.write_rows(row, values[row : row + 1].view(np.uint8))

    threads = [threading.Thread(target=work, args=(order[i::8].tolist(),)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    receipt = writer.seal()
    assert receipt.rows == ROWS
    assert np.array_equal(np.asarray(zarr.open_array(folder / "x", mode="r")[:]), values)


def test_trailing_and_inner_holes_take_no_space(folder: Path) -> None:
    writer = ShardWriter(folder / "shard", rows=65536, width=512, dtype="float32", chunk_rows=64)
    writer.write_rows(0, np.ones((64, 2048), np.uint8))
    writer.write_rows(32768, np.ones((64, 2048), np.uint8))
    writer.seal()
    assert (folder / "shard").stat().st_size < 32832 * 2048 + 20_000
    assert (folder / "shard").stat().st_blocks * 512 < 1 << 20
