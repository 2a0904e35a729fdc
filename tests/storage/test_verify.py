"""`verify` finds every flipped bit, deleted, swapped or stray file, and names it."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from storage.commit import Committer
from storage.errors import FormatError, RunFolderError
from storage.run_folder import RunFolder
from storage.testing import ScriptedRun
from storage.unit_writer import UnitWriter
from storage.verify import VerifyReport, verify

SCRIPT = ScriptedRun(seed=3, n_units=2, rows_per_shard=128, shards_per_unit=1)


@pytest.fixture
def run(folder: Path) -> RunFolder:
    run = SCRIPT.create(folder / "run")
    SCRIPT.finish(run)
    return run


def named(report: VerifyReport) -> set[str]:
    return {finding.path for finding in report.findings if finding.severity == "damage"}


def everything(run: RunFolder) -> list[str]:
    """Every file that carries information."""
    beside = {".lock", "events.jsonl"}
    return sorted(
        str(path.relative_to(run.path)) for path in run.path.rglob("*") if path.is_file() and path.name not in beside
    )


def test_a_sound_run_has_no_findings(run: RunFolder) -> None:
    report = verify(run.path)
    assert report.ok and not report.findings
    assert report.units_committed == SCRIPT.n_units
    assert report.rows_checked == sum(x.n_rows for x in SCRIPT.invokes)
    assert json.loads(json.dumps(report.to_json()))["ok"] is True


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_every_flipped_bit_is_found(folder: Path, compression: str | None) -> None:
    script = ScriptedRun(seed=3, n_units=2, rows_per_shard=128, shards_per_unit=1, compression=compression)  # type: ignore[arg-type]
    run = script.create(folder / "run")
    script.finish(run)
    rng = random.Random(17)
    files = everything(run)
    unnamed = []
    flips = 0
    for name in files * (600 // len(files) + 1):
        path = run.path / name
        content = path.read_bytes()
        if not content:
            continue
        # Half of a shard's flips go to its tail, where the index is.
        low = max(0, len(content) - 24) if "/c." in name and rng.random() < 0.5 else 0
        at, bit = rng.randrange(low, len(content)), rng.randrange(8)
        flipped = bytearray(content)
        flipped[at] ^= 1 << bit
        path.write_bytes(flipped)
        found = named(verify(run.path))
        path.write_bytes(content)
        flips += 1
        if not any(name == place or name.startswith(place + "/") for place in found):
            unnamed.append((name, at, bit, found))
    assert not unnamed
    assert flips >= 500
    assert verify(run.path).ok


def test_every_deleted_file_is_found(run: RunFolder) -> None:
    for name in everything(run):
        moved = run.path.parent / "moved"
        shutil.move(run.path / name, moved)
        try:
            found = named(verify(run.path))
        except RunFolderError as error:
            assert name == "run.json"
            assert "lost its run.json" in str(error)
        else:
            assert any(name == place or name.startswith(place + "/") for place in found), name
        shutil.move(moved, run.path / name)
    assert verify(run.path).ok


def test_every_swapped_pair_is_found(run: RunFolder) -> None:
    files = everything(run)
    rng = random.Random(2)
    for _ in range(60):
        first, second = rng.sample(files, 2)
        one, other = (run.path / first).read_bytes(), (run.path / second).read_bytes()
        if one == other:
            continue
        (run.path / first).write_bytes(other)
        (run.path / second).write_bytes(one)
        try:
            assert named(verify(run.path)), (first, second)
        except FormatError:
            assert "run.json" in (first, second)
        (run.path / first).write_bytes(one)
        (run.path / second).write_bytes(other)
    assert verify(run.path).ok


@pytest.mark.parametrize("name", ["data.zarr/acts/residual.1/c.99.0", "data.zarr/stray", "plan/invokes-00001.parquet"])
def test_stray_files_are_found(run: RunFolder, name: str) -> None:
    (run.path / name).write_bytes(b"x")
    assert name in named(verify(run.path))


def test_a_file_beside_the_store_is_a_note(run: RunFolder) -> None:
    (run.path / "notes.txt").write_text("mine")
    report = verify(run.path)
    assert report.ok
    assert [finding.path for finding in report.findings] == ["notes.txt"]


def test_the_file_of_a_profiled_call_is_known(run: RunFolder) -> None:
    (run.path / "profile.json").write_text("{}")
    assert not verify(run.path).findings


def test_a_file_that_cannot_be_read_is_a_finding(run: RunFolder) -> None:
    for name in everything(run):
        path = run.path / name
        kept = path.read_bytes()
        path.unlink()
        path.mkdir()  # what the operating system refuses to read, also to root
        report = verify(run.path) if name != "run.json" else None
        assert report is None or name in named(report) or (name.startswith("plan/") and "plan" in named(report)), name
        path.rmdir()
        path.write_bytes(kept)
    assert verify(run.path).ok


def test_an_unfinished_run_is_sound_so_far(folder: Path) -> None:
    run = SCRIPT.create(folder / "run")
    with Committer.open(run) as committer:
        committer.publish([SCRIPT.attempt(run, 1, committer.next_attempt(1))])
        half = UnitWriter(run, run.layout, unit=0, attempt=committer.next_attempt(0))
        report = verify(run.path)
        half.abort()
    assert report.ok and not report.complete
    assert report.units_committed == 1
    assert [finding.kind for finding in report.findings] == ["incomplete"]


def test_a_half_renamed_unit_is_a_note(folder: Path) -> None:
    run = SCRIPT.create(folder / "run")
    (run.data / "acts" / "attempt" / "c.0.0").write_bytes(b"anything")
    report = verify(run.path)
    assert report.ok
    assert {finding.kind for finding in report.findings} == {"incomplete", "stray"}


def test_labels_are_held_against_the_plan(folder: Path) -> None:
    """Rows whose files are sound but whose token ids are not the prompt's."""
    run = SCRIPT.create(folder / "run")
    with Committer.open(run) as committer:
        attempt = committer.next_attempt(0)
        writer = UnitWriter(run, run.layout, unit=0, attempt=attempt)
        victim = next(x for x in SCRIPT.of_unit(0) if x.n_rows > 1)
        for array, row, data in SCRIPT.writes(0, attempt):
            if array == "tokens/id" and row == victim.row_start:
                data = data + 1
            writer.write(array, row, data)
        committer.publish([writer.seal(invokes=SCRIPT.outcomes(0))])
    findings = [x for x in verify(run.path).findings if x.severity == "damage"]
    assert findings and {x.kind for x in findings} == {"labels"}
    assert f"invoke {victim.invoke}" in findings[0].message


@pytest.mark.parametrize(("value", "words"), [(np.nan, "NaN or infinity"), (0.0, "rows are zero")])
def test_values_that_cannot_be_right_are_named(folder: Path, value: float, words: str) -> None:
    run = SCRIPT.create(folder / "run")
    with Committer.open(run) as committer:
        attempt = committer.next_attempt(0)
        writer = UnitWriter(run, run.layout, unit=0, attempt=attempt)
        for array, row, data in SCRIPT.writes(0, attempt):
            writer.write(array, row, np.full_like(data, value) if array == "acts/residual.1" else data)
        committer.publish([writer.seal(invokes=SCRIPT.outcomes(0))])
    findings = [x for x in verify(run.path).findings if x.kind == "values" and x.path == "data.zarr/acts/residual.1"]
    assert findings and words in findings[0].message
    assert not verify(run.path).ok


def test_no_run_is_an_error(folder: Path) -> None:
    with pytest.raises(RunFolderError, match="does not exist"):
        verify(folder / "nothing")
