"""Runs of every released format version stay readable; today's writer still makes the same bytes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
import zarr

from harvest.reader import open_run
from storage.reader import StoreReader
from storage.verify import verify
from tests.storage.golden.make import golden_script

HERE = Path(__file__).parent / "golden"
RUNS = sorted(path.name for path in HERE.iterdir() if path.is_dir() and path.name.startswith("v"))


def expected(name: str) -> dict[str, np.ndarray[Any, Any]]:
    with np.load((HERE / name).with_suffix(".npz")) as values:
        return {array.replace("|", "/"): values[array] for array in values}


def test_there_are_golden_runs() -> None:
    assert {"v1-plain", "v1-zstd"} <= set(RUNS)


@pytest.mark.parametrize("name", RUNS)
def test_golden_runs_are_read(name: str) -> None:
    reader = StoreReader(HERE / name)
    group = zarr.open_group(HERE / name / "data.zarr", mode="r")
    for array, values in expected(name).items():
        assert np.array_equal(reader.array(array, slice(None)).view(np.uint8), values), array
        assert np.array_equal(np.asarray(group[array][:]).view(np.uint8), values), array
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(HERE / name / "data.zarr" / array)}}
        by_tensorstore = tensorstore.open(spec, read=True).result().read().result()
        assert np.array_equal(np.ascontiguousarray(by_tensorstore).view(np.uint8), values), array
    reader.close()
    prompt = open_run(HERE / name).prompt(0)
    assert prompt.key == "row-0"
    assert len(prompt.token_ids) == len(prompt.rows["residual.1"])


@pytest.mark.parametrize("name", RUNS)
def test_golden_runs_are_sound(name: str, folder: Path) -> None:
    shutil.copytree(HERE / name, folder / name)
    report = verify(folder / name)
    assert report.ok and report.complete, report.findings
    assert not report.findings


def test_the_writer_still_makes_these_bytes(folder: Path) -> None:
    script = golden_script("plain")
    run = script.create(folder / "run")
    script.finish(run)
    golden = HERE / "v1-plain" / "data.zarr"
    files = sorted(path.relative_to(golden) for path in golden.rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(run.data) for path in run.data.rglob("*") if path.is_file())
    for file in files:
        assert (golden / file).read_bytes() == (run.data / file).read_bytes(), file
