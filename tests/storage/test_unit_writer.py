"""The unit writer: dtypes, bounds, holes, statistics, and errors that name the array."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from storage.errors import FormatError, RowError, StorageError
from storage.format import LocationSpec
from storage.run_folder import RunFolder
from storage.shard import ShardReceipt, ShardWriter
from storage.testing import ScriptedRun
from storage.unit_writer import UnitWriter

SCRIPT = ScriptedRun(
    n_units=2,
    rows_per_shard=64,
    shards_per_unit=2,
    locations=(
        LocationSpec(name="b", path="b", width=4),
        LocationSpec(name="h", path="h", width=4, dtype="float16"),
        LocationSpec(name="f", path="f", width=4, dtype="float32"),
    ),
)


@pytest.fixture
def run(folder: Path) -> RunFolder:
    return SCRIPT.create(folder / "run")


@pytest.fixture
def writer(run: RunFolder) -> UnitWriter:
    return UnitWriter(run, run.layout, unit=1, attempt=7)


def read_back(writer: UnitWriter, array: str) -> np.ndarray[Any, Any]:
    import zarr

    name = writer.layout.arrays[array].path
    target = writer.folder.parent.parent / "data.zarr"
    for path in (writer.folder / name).iterdir():
        path.rename(target / name / path.name)
    return np.asarray(zarr.open_group(target, mode="r")[array][writer.layout.rows_of(writer.unit).start :])


def test_a_piece_may_cross_shards(writer: UnitWriter) -> None:
    data = np.arange(40, dtype=np.float32).reshape(10, 4)
    for array in writer.layout.arrays:
        spec = writer.layout.arrays[array]
        writer.write(array, 60, data[:, : spec.width] if len(spec.shape) == 2 else data[:, 0].astype(spec.native))
    assert writer.written("acts/f") == 10
    receipt = writer.seal(expected_rows=10)
    assert {(file.array, file.shard): file.rows for file in receipt.files}["acts/f", 2] == 4
    assert np.array_equal(read_back(writer, "acts/f")[60:70], data)


@pytest.mark.parametrize("array", ["acts/b", "acts/h", "acts/f"])
@pytest.mark.parametrize("given", ["float32", "bfloat16", "uint16"])
def test_floats_are_converted_to_the_stored_type(writer: UnitWriter, array: str, given: str) -> None:
    values = np.array([[1.5, -2.25, 0.0, 384.0]], np.float32)
    data: Any = values
    if given == "bfloat16":
        data = values.astype(ml_dtypes.bfloat16)
    elif given == "uint16":
        data = values.astype(ml_dtypes.bfloat16).view(np.uint16)
    if given == "uint16" and array != "acts/b":
        with pytest.raises(RowError, match=f"{array}: rows of dtype uint16 cannot be stored"):
            writer.write(array, 0, data)
        return
    writer.write(array, 0, data)
    for other in writer.layout.arrays:
        if other != array:
            spec = writer.layout.arrays[other]
            writer.write(other, 0, np.ones((1, *spec.shape[1:]), spec.native))
    writer.seal()
    assert read_back(writer, array)[0].astype(np.float32).tolist() == values[0].tolist()


def test_float16_refuses_what_it_cannot_hold(writer: UnitWriter) -> None:
    data = np.full((2, 4), 7e4, np.float32)
    with pytest.raises(RowError, match=r"acts/h: value 70000 does not fit float16 .*bfloat16 or float32"):
        writer.write("acts/h", 0, data)
    assert writer.written("acts/h") == 0


@pytest.mark.parametrize(
    ("array", "row", "data", "words"),
    [
        ("acts/f", 0, np.zeros((2, 5), np.float32), r"acts/f: rows have shape \[2, 5\]; \[n, 4\] is needed"),
        ("acts/f", 0, np.zeros(4, np.float32), r"\[n, 4\] is needed"),
        ("tokens/id", 0, np.zeros((2, 1), np.int32), r"tokens/id: .* \[n\] is needed"),
        ("acts/f", 127, np.zeros((2, 4), np.float32), "rows 127 to 128 are outside unit 1, which has rows 0 to 127"),
        ("acts/f", -1, np.zeros((1, 4), np.float32), "outside unit 1"),
        ("tokens/id", 0, np.array([2**40]), "values beyond int32"),
        ("tokens/id", 0, np.array([1.5]), "dtype float64 cannot be stored as int32"),
        ("acts/f", 0, np.zeros((1, 4), np.int32), "dtype int32 cannot be stored as float32"),
    ],
)
def test_bad_rows_are_refused(writer: UnitWriter, array: str, row: int, data: Any, words: str) -> None:
    with pytest.raises(RowError, match=words):
        writer.write(array, row, data)


def test_unknown_and_foreign_arrays(run: RunFolder, writer: UnitWriter) -> None:
    with pytest.raises(FormatError, match="no array 'acts/z'; it has acts/b"):
        writer.write("acts/z", 0, np.zeros((1, 4), np.float32))
    partial = UnitWriter(run, run.layout, unit=0, attempt=1, arrays=["acts/b"])
    with pytest.raises(StorageError, match="owns acts/b, not 'acts/f'"):
        partial.write("acts/f", 0, np.zeros((1, 4), np.float32))
    with pytest.raises(FormatError, match="Unit 9 does not exist"):
        UnitWriter(run, run.layout, unit=9, attempt=1)


def fill(writer: UnitWriter, n: int) -> None:
    for array, spec in writer.layout.arrays.items():
        writer.write(array, 0, np.ones((n, *spec.shape[1:]), spec.native))


def test_seal_wants_the_same_rows_everywhere(writer: UnitWriter) -> None:
    fill(writer, 5)
    with pytest.raises(RowError, match="must have 6 rows, but acts/b has 5"):
        writer.seal(expected_rows=6)
    writer.write("acts/f", 5, np.ones((1, 4), np.float32))
    with pytest.raises(RowError, match="acts/f holds other rows than acts/b"):
        writer.seal()
    writer.clear("acts/f", 5, 1)
    assert {file.rows for file in writer.seal(expected_rows=5).files} == {5, 0}


def test_sealed_files_count_one_by_one(writer: UnitWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    """What tells a slow disk from one that takes nothing."""
    fill(writer, 5)
    seal, seen, one_at_a_time = ShardWriter.seal, [], threading.Lock()

    def look_and_seal(shard: ShardWriter, *, fsync: bool) -> ShardReceipt:
        with one_at_a_time:
            seen.append(writer.sealed_files)
            return seal(shard, fsync=fsync)

    monkeypatch.setattr(ShardWriter, "seal", look_and_seal)
    files = writer.seal(expected_rows=5).files
    assert writer.sealed_files == len(files) == len(seen)
    assert seen[0] == 0
    assert max(seen) > 0


def test_cleared_rows_are_holes_again(writer: UnitWriter) -> None:
    fill(writer, 70)
    for array in writer.layout.arrays:
        writer.clear(array, 62, 8)
    receipt = writer.seal(expected_rows=62)
    assert receipt.statistics["f"].rows == 62
    assert not read_back(writer, "acts/f")[62:].any()
    assert (read_back(writer, "tokens/invoke")[62:] == -1).all()
    with pytest.raises(StorageError, match="sealed"):
        writer.write("acts/f", 0, np.ones((1, 4), np.float32))


def test_clearing_outside_the_unit(writer: UnitWriter) -> None:
    with pytest.raises(RowError, match="outside unit 1"):
        writer.clear("acts/f", 128, 1)


def test_many_locations_and_shards_have_room(folder: Path) -> None:
    """More files than the usual soft limit of open files."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip(f"this process may open {hard} files at most")
    script = ScriptedRun(
        n_units=1,
        rows_per_shard=64,
        shards_per_unit=16,
        lengths=(4,),
        locations=tuple(LocationSpec(name=f"a{i}", path="a", width=2) for i in range(40)),
    )
    run = script.create(folder / "run")
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        script.finish(run)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    script.assert_store(run)


def test_abort_leaves_nothing(writer: UnitWriter) -> None:
    fill(writer, 5)
    writer.abort()
    assert not [path for path in writer.folder.rglob("*") if path.is_file()]
    writer.abort()


def test_an_attempt_cannot_be_written_twice(run: RunFolder, writer: UnitWriter) -> None:
    with pytest.raises(StorageError, match="File exists"):
        UnitWriter(run, run.layout, unit=1, attempt=7)
    fill(writer, 1)
    writer.seal(expected_rows=1)


def test_direct_gives_the_same_bytes(folder: Path) -> None:
    """O_DIRECT where chunks are whole blocks, the usual path elsewhere: the same files either way."""
    script = ScriptedRun(seed=8, n_units=1, locations=(LocationSpec(name="wide", path="wide", width=64),))
    files = []
    for name in ("buffered", "direct"):
        run = script.create(folder / name)
        receipt = script.attempt(run, 0, 1, direct=name == "direct")
        files.append([(file.array, file.shard, file.digest, file.file_bytes) for file in receipt.files])
    assert files[0] == files[1]
