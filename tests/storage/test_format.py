"""The layout and its metadata documents: opened by zarr without a warning, refused where they cannot work."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray
import zarr
from hypothesis import given
from hypothesis import strategies as st

from storage.errors import FormatError
from storage.format import LocationSpec, StoreLayout
from storage.run_folder import RunFolder
from storage.testing import ScriptedRun


def layout(**changes: Any) -> StoreLayout:
    values: dict[str, Any] = {
        "locations": (LocationSpec(name="residual.1", path="model.layers.1.output.0", alias="residual.1", width=48),),
        "rows_per_shard": 256,
        "shards_per_unit": 2,
        "n_units": 3,
        "n_invokes": 10,
    }
    return StoreLayout(**(values | changes))


@pytest.mark.parametrize("name", ["residual.10", "model.layers.10.mlp.output", "a", "_x", "0", "A-b_c.d"])
def test_safe_names(name: str) -> None:
    assert LocationSpec(name=name, path=name, width=1).array == f"acts/{name}"


@pytest.mark.parametrize("name", ["", ".", "..", "__x", "a/b", "a b", "é", ".hidden", "-x", "x" * 201, "a\n", "zarr*"])
def test_unsafe_names_are_refused(name: str) -> None:
    with pytest.raises(FormatError, match="cannot name an array"):
        LocationSpec(name=name, path="x", width=1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rows_per_shard": 100}, "multiple of chunk_rows"),
        ({"rows_per_shard": 0}, "at least 1"),
        ({"shards_per_unit": 0}, "at least 1"),
        ({"n_units": -1}, "negative"),
        ({"compression": "gzip"}, "neither None nor 'zstd'"),
        (
            {"locations": (LocationSpec(name="a", path="a", width=1), LocationSpec(name="A", path="b", width=1))},
            "share",
        ),
    ],
)
def test_layouts_that_cannot_work_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(FormatError, match=words):
        layout(**changes)


def test_bad_locations_are_refused() -> None:
    with pytest.raises(FormatError, match="width 0"):
        LocationSpec(name="a", path="a", width=0)
    with pytest.raises(FormatError, match="dtype 'int8'"):
        LocationSpec(name="a", path="a", width=1, dtype="int8")  # type: ignore[arg-type]


@given(
    units=st.integers(0, 100),
    k=st.integers(1, 4),
    r=st.sampled_from([64, 192, 8192]),
    zstd=st.booleans(),
    p=st.booleans(),
)
def test_a_layout_survives_json(units: int, k: int, r: int, zstd: bool, p: bool) -> None:
    one = layout(n_units=units, shards_per_unit=k, rows_per_shard=r, compression="zstd" if zstd else None, logprobs=p)
    assert StoreLayout.from_json(json.loads(json.dumps(one.to_json()))) == one
    for spec in one.arrays.values():
        assert spec.shards is not None
        assert spec.shards[0] % spec.chunks[0] == 0
        assert spec.shape[0] == units * k * r


def test_a_foreign_layout_is_refused() -> None:
    with pytest.raises(FormatError, match="Not a store layout"):
        StoreLayout.from_json({"locations": [], "surprise": 1})
    with pytest.raises(FormatError, match="Not a store layout"):
        StoreLayout.from_json({})


def test_predictions_hold(folder: Path) -> None:
    script = ScriptedRun(seed=1)
    run = script.create(folder / "run")
    script.finish(run)
    rows = sum(x.n_rows for x in script.invokes)
    shards = [path for path in run.data.rglob("c.*") if "index" not in path.parts]
    assert len(shards) == run.layout.n_files
    found = sum(path.stat().st_size for path in run.data.rglob("c.*"))
    predicted = run.layout.predicted_bytes(rows)
    # What is not predicted is the rest of begun chunks.
    assert 0 <= found - predicted < run.layout.n_shards * 64 * run.layout.row_bytes * 8


@pytest.fixture
def finished(folder: Path) -> RunFolder:
    script = ScriptedRun(seed=2)
    run = script.create(folder / "run")
    script.finish(run)
    return run


def test_zarr_opens_everything_without_a_warning(finished: RunFolder) -> None:
    """In a process of its own, where every warning is an error and nothing but zarr and the data type is imported."""
    code = (
        "import sys, storage.bfloat16, zarr\n"
        "group = zarr.open(sys.argv[1])\n"
        "members = dict(group.members(max_depth=None))\n"
        "print(group.tree() if False else '', *sorted(members))\n"
        "for node in members.values():\n"
        "    getattr(node, 'shape', None) and node[:]\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, str(finished.data)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    expected = {"acts", "tokens", "index", *finished.layout.arrays, *finished.layout.index_arrays}
    assert set(done.stdout.split()) == expected


def test_the_group_says_what_it_is(finished: RunFolder) -> None:
    group = zarr.open_group(finished.data, mode="r")
    about = group.attrs["harvest"]
    assert about["format_version"] == 1
    assert about["plan_hash"] == finished.layout.plan_hash
    array = group["acts/residual.1"]
    assert array.attrs["path"] == "model.layers.1.output.0"
    assert array.metadata.dimension_names == ("row", "width_32")


def test_xarray_opens_the_locations(finished: RunFolder) -> None:
    data = xarray.open_zarr(finished.data / "acts", consolidated=False)
    assert set(data) == {location.name for location in finished.layout.locations}
    labels = xarray.open_zarr(finished.data / "tokens", consolidated=False)
    # xarray masks the fill value of labels with NaN unless told otherwise; -1 marks a hole either way.
    assert labels["invoke"].sizes["row"] == finished.layout.n_rows


def test_opening_writes_nothing(finished: RunFolder) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished.data.rglob("*")}
    group = zarr.open(finished.data)
    assert np.asarray(group["tokens/invoke"][:]).max() >= 0
    assert {path: path.stat().st_mtime_ns for path in finished.data.rglob("*")} == before
