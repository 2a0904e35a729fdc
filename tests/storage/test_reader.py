"""Readers: numpy and torch, finished and unfinished runs, every encoding, clear errors."""

from __future__ import annotations

import multiprocessing
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import harvest
from harvest.reader import open_run, to_torch
from storage.commit import Committer
from storage.errors import DamagedError, FormatError, NotCommittedError, RunFolderError, StorageError
from storage.format import LocationSpec
from storage.ledger import encode_line
from storage.reader import StoreReader
from storage.run_folder import RunFolder
from storage.testing import ScriptedRun

SCRIPT = ScriptedRun(seed=21, n_units=3, rows_per_shard=128, shards_per_unit=2)


def finished(folder: Path, **changes: Any) -> RunFolder:
    script = ScriptedRun(**({"seed": 21, "n_units": 3} | changes))
    run = script.create(folder / "run")
    script.finish(run)
    return run


@settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(start=st.integers(0, 767), n=st.integers(0, 400), step=st.integers(1, 5), zstd=st.booleans())
def test_any_slice_is_what_zarr_reads(folder: Path, start: int, n: int, step: int, zstd: bool) -> None:
    path = folder / ("z" if zstd else "n")
    if not path.exists():
        finished(path, compression="zstd" if zstd else None)
    reader = StoreReader(path / "run")
    group = zarr.open_group(path / "run" / "data.zarr", mode="r")
    where = slice(start, min(768, start + n), step)
    for array in reader.layout.arrays:
        assert reader.array(array, where).tobytes() == np.asarray(group[array][where]).tobytes()
    reader.close()


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_prompts(folder: Path, compression: Any) -> None:
    run = finished(folder, compression=compression)
    reader = harvest.open(run.path)
    script = ScriptedRun(seed=21, n_units=3)
    for invoke in script.invokes[:6]:
        prompt = reader.prompt(invoke.invoke)
        assert prompt.key == f"row-{invoke.invoke}"
        assert (prompt.row_start, prompt.n_prompt_tokens, prompt.unit) == (
            invoke.row_start,
            invoke.n_prompt,
            invoke.unit,
        )
        assert np.array_equal(prompt.token_ids, script.tokens(invoke.invoke, invoke.n_rows))
        assert np.array_equal(prompt.prompt_token_ids, script.tokens(invoke.invoke, invoke.n_prompt))
        assert prompt.positions.tolist() == list(range(invoke.n_rows))
        rows = prompt.rows["residual.1"]
        assert (rows.dtype, rows.shape) == (torch.bfloat16, (invoke.n_rows, 32))
        expected = script.rows("acts/residual.1", invoke)
        assert rows.view(torch.int16).numpy().tobytes() == expected.tobytes()
    reader.close()


def test_torch_shares_memory() -> None:
    values = np.arange(12, dtype=np.float32).reshape(3, 4).astype(ml_dtypes.bfloat16)
    tensor = to_torch(values)
    assert tensor.dtype == torch.bfloat16
    assert tensor.data_ptr() == values.ctypes.data
    assert tensor.tolist() == values.astype(np.float32).tolist()
    plain = np.ones(3, np.float16)
    assert to_torch(plain).data_ptr() == plain.ctypes.data


def test_locations_by_any_of_their_names(folder: Path) -> None:
    run = finished(folder)
    reader = open_run(run.path)
    by_alias = reader.rows("residual.1", slice(0, 5))
    by_path = reader.rows("model.layers.1.output.0", range(5))
    assert torch.equal(by_alias, by_path)
    assert reader.rows("residual.1", 3).shape == (1, 32)
    with pytest.raises(StorageError, match="no location 'residual.2'; it has residual.1"):
        reader.rows("residual.2", slice(0, 1))
    with pytest.raises(StorageError, match="outside the store"):
        reader.rows("residual.1", range(1020, 1030))
    with pytest.raises(StorageError, match="forwards"):
        reader.rows("residual.1", slice(None, None, -1))
    with pytest.raises(StorageError, match="was skipped"):
        reader.prompt(reader.layout.n_invokes - 1)
    with pytest.raises(StorageError, match="There is no invoke 99999"):
        reader.prompt(99999)


def test_an_unfinished_run_is_read_as_far_as_it_is_committed(folder: Path) -> None:
    run = SCRIPT.create(folder / "run")
    reader = open_run(run.path)
    assert reader.committed == set() and not reader.complete
    with Committer.open(run) as committer:
        committer.publish([SCRIPT.attempt(run, 1, committer.next_attempt(1))])
        with pytest.raises(NotCommittedError, match="Unit 1 of .* is not committed"):
            reader.rows("residual.1", SCRIPT.layout.rows_of(1))
        reader.refresh()
        assert reader.committed == {1}
        assert len(reader.rows("residual.1", SCRIPT.layout.rows_of(1))) == 256
        inside = SCRIPT.of_unit(1)[0]
        assert reader.prompt(inside.invoke).rows["residual.1"].shape[0] == inside.n_rows
        with pytest.raises(NotCommittedError):
            reader.rows("residual.1", slice(None))
        with pytest.raises(NotCommittedError):
            reader.prompt(SCRIPT.of_unit(0)[0].invoke)


def test_threads_share_a_reader(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With fewer open files than shards in use, so that files are dropped while others read from them."""
    monkeypatch.setattr("storage.reader._OPEN_SHARDS", 1)
    reader = StoreReader(finished(folder).path)
    whole = {array: reader.array(array, slice(None)) for array in reader.layout.arrays}

    def work(seed: int) -> bool:
        rng = random.Random(seed)
        for _ in range(60):
            array, start = rng.choice(sorted(whole)), rng.randrange(700)
            if reader.array(array, slice(start, start + 60)).tobytes() != whole[array][start : start + 60].tobytes():
                return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(16)))
    reader.close()


def _read_in_child(path: Path, answers: Any) -> None:
    answers.put(StoreReader(path).array("tokens/invoke", slice(None)).tobytes())


def test_forked_readers(folder: Path) -> None:
    """A loader's workers are forked with the reader open."""
    run = finished(folder)
    reader = StoreReader(run.path)
    expected = reader.array("tokens/invoke", slice(None)).tobytes()
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    children = [context.Process(target=_read_in_child, args=(run.path, answers)) for _ in range(2)]
    for child in children:
        child.start()
    assert [answers.get(timeout=60) for _ in children] == [expected] * 2
    for child in children:
        child.join()


@pytest.mark.parametrize("damage", ["truncated", "index", "gone", "folder", "chunk"])
def test_damage_is_an_error_not_wrong_rows(folder: Path, damage: str) -> None:
    run = finished(folder, compression="zstd")
    path = run.data / "acts" / "residual.1" / "c.0.0"
    content = bytearray(path.read_bytes())
    if damage == "gone":
        path.unlink()
    elif damage == "folder":
        path.unlink()
        path.mkdir()
    elif damage == "truncated":
        path.write_bytes(content[:-10])
    else:
        content[-8 if damage == "index" else 1] ^= 255
        path.write_bytes(content)
    with pytest.raises(DamagedError, match="harvest verify"):
        open_run(run.path).rows("residual.1", slice(0, 64))


@pytest.mark.parametrize(
    "what", ["nothing", "file", "foreign folder", "foreign zarr", "store itself", "version", "json"]
)
def test_what_is_no_run_is_refused_with_the_reason(folder: Path, what: str) -> None:
    path = folder / "x"
    words = "does not exist"
    if what == "file":
        path.write_text("x")
        words = "cannot be read: Not a directory"
    elif what == "foreign folder":
        path.mkdir()
        words = "is not a run"
    elif what == "foreign zarr":
        zarr.create_group(path)
        words = "Zarr store that Harvest did not make"
    elif what == "store itself":
        path = finished(folder).data
        words = f"open {folder / 'run'}"
    elif what == "version":
        path = finished(folder).path
        from storage.run_folder import _with_checksum

        raw = (path / "run.json").read_bytes().replace(b'"format_version": 1', b'"format_version": 7', 1)
        at = raw.rindex(b'"checksum": "') + 13
        (path / "run.json").write_bytes(_with_checksum(raw[:at] + b"0" * 32 + raw[at + 32 :]))
        words = "format version 7; this version of Harvest reads 1"
    elif what == "json":
        path.mkdir()
        (path / "run.json").write_text("{}")
        words = "does not describe a Harvest run"
    with pytest.raises((RunFolderError, FormatError), match=words):
        open_run(path)


def test_ten_thousand_units_open_without_listing(folder: Path) -> None:
    """Opening reads the ledger and run.json; the limit is generous, the benchmark has the number."""
    script = ScriptedRun(
        n_units=1, rows_per_shard=64, shards_per_unit=1, locations=(LocationSpec(name="a", path="a", width=8),)
    )
    run = script.create(folder / "run")
    script.finish(run)
    lines = [
        {"unit": i, "attempt": 100001, "rows": 60, "bytes": 9999, "receipt": [0, 1, "0" * 32]} for i in range(10_000)
    ]
    ledger = b"".join(encode_line({"seq": i, "group": i, **line}) for i, line in enumerate(lines, start=1))
    run.ledger.write_bytes(ledger)
    began = time.monotonic()
    reader = open_run(run.path)
    assert time.monotonic() - began < 10
    assert len(reader.committed) == 10_000
