"""Making and opening runs, the plan on disk, modes of files, and what goes wrong with disks."""

from __future__ import annotations

import json
import os
import pickle
import resource
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import storage.plan_files
from storage.commit import Committer
from storage.errors import (
    DamagedError,
    FormatError,
    RunFolderError,
    StorageError,
    StorageFullError,
)
from storage.plan_files import INVOKE_SCHEMA, PlanReader, write_plan
from storage.run_folder import RunFolder, free_bytes
from storage.testing import ScriptedRun

SCRIPT = ScriptedRun(seed=31, n_units=3, rows_per_shard=64, shards_per_unit=1)


def test_a_run_is_readable_with_cat(folder: Path) -> None:
    run = SCRIPT.create(folder / "a" / "run")
    content = json.loads((run.path / "run.json").read_text())
    assert content["format_version"] == 1
    assert content["run"] == {"name": "scripted", "seed": 31}
    assert RunFolder.open(run.path) == run
    assert run.config_toml() == "seed = 31\n"
    assert run.provenance() == {"by": "storage.testing"}
    assert not (run.path / ".creating").exists()


@pytest.mark.parametrize("what", ["file", "run", "full"])
def test_folders_in_use_are_refused(folder: Path, what: str) -> None:
    path = folder / "run"
    if what == "file":
        path.write_text("x")
        words = "is a file"
    elif what == "run":
        SCRIPT.create(path)
        words = "holds a run already"
    else:
        path.mkdir()
        (path / "precious").write_text("x")
        words = r"not empty and not a run \(it holds precious\)"
    with pytest.raises(RunFolderError, match=words):
        SCRIPT.create(path)


def test_an_interrupted_creation_is_recognised_and_repeated(folder: Path) -> None:
    run = SCRIPT.create(folder / "run")
    (run.path / ".creating").write_text("")
    (run.path / "run.json").unlink()
    with pytest.raises(RunFolderError, match="was not completely made"):
        RunFolder.open(run.path)
    SCRIPT.create(run.path)
    SCRIPT.finish(RunFolder.open(run.path))
    SCRIPT.assert_store(run)


def test_layout_and_plan_must_agree(folder: Path) -> None:
    with pytest.raises(RunFolderError, match="has 3 units, but the plan has 2"):
        RunFolder.create(
            folder / "run",
            layout=SCRIPT.layout,
            plan=ScriptedRun(seed=31, n_units=2, rows_per_shard=64, shards_per_unit=1).plan(),
            run={},
            config_toml="",
            provenance={},
        )


def test_a_plan_written_elsewhere_is_taken_over(folder: Path) -> None:
    source = SCRIPT.plan()
    files = write_plan(folder / "plan", source.units, source.skipped)
    layout = type(SCRIPT.layout).from_json({**SCRIPT.layout.to_json(), "plan_hash": ""})
    run = RunFolder.create(folder / "run", layout=layout, plan=files, run={}, config_toml="", provenance={})
    assert run.layout.plan_hash == files.hash
    assert run.plan.summary().num_rows == files.n_invokes == len(SCRIPT.invokes)


def test_umask_and_group_bit_hold(folder: Path) -> None:
    """A shared folder stays shared: its group is inherited and the group may write."""
    shared = folder / "shared"
    shared.mkdir()
    os.chown(shared, -1, os.getgid())
    shared.chmod(0o2775)
    before = os.umask(0o002)
    try:
        run = SCRIPT.create(shared / "run")
        SCRIPT.finish(run)
    finally:
        os.umask(before)
    for path in [run.path, *run.path.rglob("*")]:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o2775 if path.is_dir() else 0o664), path
        assert path.stat().st_gid == shared.stat().st_gid


def test_a_strict_umask_holds_too(folder: Path) -> None:
    before = os.umask(0o077)
    try:
        run = SCRIPT.create(folder / "run")
        SCRIPT.finish(run)
    finally:
        os.umask(before)
    assert all(stat.S_IMODE(path.stat().st_mode) & 0o077 == 0 for path in run.path.rglob("*"))


def unit_table(unit: int, n: int = 2) -> pa.Table:
    rows = [
        {
            "invoke": unit * n + i,
            "key": None,
            "unit": unit,
            "row_start": unit * 64 + i * 8,
            "n_rows": 8,
            "n_prompt_tokens": 8,
            "max_tokens": 1,
            "truncated": False,
            "token_ids": [unit, i],
        }
        for i in range(n)
    ]
    return pa.Table.from_pylist(rows, schema=INVOKE_SCHEMA)


def test_plans_of_many_files(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage.plan_files, "UNITS_PER_FILE", 3)
    files = write_plan(folder / "plan", (unit_table(unit) for unit in range(8)))
    assert sorted(files.files) == [*(f"invokes-{i:05d}.parquet" for i in range(3)), "skipped.parquet"]
    reader = PlanReader(folder / "plan")
    for unit in (7, 0, 3, 5):
        assert reader.read_unit(unit).equals(unit_table(unit))
    assert reader.summary().column("unit").to_pylist() == [unit for unit in range(8) for _ in range(2)]
    assert "token_ids" not in reader.summary().column_names
    assert reader.skipped().num_rows == 0
    again = write_plan(folder / "again", (unit_table(unit) for unit in range(8)))
    assert again.hash == files.hash
    for unit in (8, -1, 100):
        with pytest.raises(StorageError):
            reader.read_unit(unit)


def test_threads_share_a_plan(folder: Path) -> None:
    files = write_plan(folder / "plan", (unit_table(unit, 50) for unit in range(40)))
    reader = pickle.loads(pickle.dumps(PlanReader(files.folder)))
    with ThreadPoolExecutor(8) as pool:
        tables = list(pool.map(reader.read_unit, [unit % 40 for unit in range(2000)]))
    assert all(table.equals(tables[i % 40]) for i, table in enumerate(tables))
    assert [table.column("unit")[0].as_py() for table in tables[:40]] == list(range(40))


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ([unit_table(1)], "belongs to units"),
        ([unit_table(0).slice(0, 0)], "is empty"),
        ([unit_table(0).drop_columns(["n_rows"])], "other columns"),
    ],
)
def test_bad_plans_are_refused(folder: Path, tables: list[pa.Table], words: str) -> None:
    with pytest.raises(FormatError, match=words):
        write_plan(folder / "plan", tables)


def test_a_damaged_plan_is_an_error(folder: Path) -> None:
    run = SCRIPT.create(folder / "run")
    path = run.path / "plan" / "invokes-00000.parquet"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(DamagedError, match="cannot be read"):
        run.plan.read_unit(0)
    path.unlink()
    with pytest.raises(DamagedError, match="is missing"):
        RunFolder.open(run.path).plan.read_unit(0)


def test_free_bytes(folder: Path) -> None:
    assert free_bytes(folder / "not" / "there" / "yet") > 0


# -- disks that refuse -----------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(folder: Path) -> Any:
    """A file system of one MiB; needs the right to mount."""
    path = folder / "small"
    path.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"cannot mount a small file system here: {done.stderr.strip()}")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


WIDE = ScriptedRun(seed=7, n_units=4, rows_per_shard=512, shards_per_unit=1)


def test_a_full_disk_is_a_clear_error_and_the_run_resumes(small_disk: Path) -> None:
    run = WIDE.create(small_disk / "run")
    ballast = small_disk / "ballast"
    with Committer.open(run) as committer:
        committer.publish([WIDE.attempt(run, 0, committer.next_attempt(0))])
        ballast.write_bytes(bytes(free_bytes(small_disk) - 16384))
        with pytest.raises(StorageFullError, match=r"No space left while .*free space .*same command again to resume"):
            WIDE.attempt(run, 1, committer.next_attempt(1))
    ballast.unlink()
    WIDE.finish(RunFolder.open(run.path))
    WIDE.assert_store(run)


def test_a_disk_full_while_publishing(small_disk: Path) -> None:
    """Receipts and ledger find no space: nothing is committed by half, and the same receipts go in later."""
    run = WIDE.create(small_disk / "run")
    ballast = small_disk / "ballast"
    with Committer.open(run) as committer:
        receipt = WIDE.attempt(run, 0, committer.next_attempt(0))
        ballast.write_bytes(bytes(free_bytes(small_disk)))
        with pytest.raises(StorageFullError, match="No space left"):
            committer.publish([receipt])
        assert committer.committed == set()
        ballast.unlink()
        assert committer.publish([receipt]).committed == (0,)
        assert run.receipts.read_bytes().count(b"\n") == 1
    WIDE.finish(RunFolder.open(run.path))
    WIDE.assert_store(run)


def test_creation_on_a_full_disk(small_disk: Path) -> None:
    (small_disk / "ballast").write_bytes(bytes(free_bytes(small_disk)))
    with pytest.raises(StorageFullError):
        WIDE.create(small_disk / "run")
    (small_disk / "ballast").unlink()
    WIDE.finish(WIDE.create(small_disk / "run"))


def test_a_limit_on_file_size(folder: Path) -> None:
    run = WIDE.create(folder / "run")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))  # Python ignores SIGXFSZ: writes fail with EFBIG
        with pytest.raises(StorageFullError, match="file size limit"):
            WIDE.attempt(run, 0, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    WIDE.finish(run)
    WIDE.assert_store(run)


LOSE_PERMISSION = """
import os, sys
from pathlib import Path
from storage.errors import PermissionLostError
from storage.run_folder import RunFolder
from storage.testing import ScriptedRun
script = ScriptedRun(seed=31, n_units=3, rows_per_shard=64, shards_per_unit=1)
run = RunFolder.open(Path(sys.argv[1]))
os.setgid(65534); os.setuid(65534)
try:
    script.attempt(run, 0, 1)
except PermissionLostError as error:
    print(error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_lost_permission_is_a_clear_error(folder: Path) -> None:
    run = SCRIPT.create(folder / "run")
    folder.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", LOSE_PERMISSION, str(run.path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert "restore the permission and give the same command again" in done.stdout, done.stderr
    SCRIPT.finish(run)
    SCRIPT.assert_store(run)


def test_a_folder_that_vanishes(folder: Path) -> None:
    """The store's folder half deleted: publishing fails with the path, verify names what is gone."""
    run = SCRIPT.create(folder / "run")
    with Committer.open(run) as committer:
        receipt = SCRIPT.attempt(run, 0, committer.next_attempt(0))
        (run.data / "acts" / "attempt" / "zarr.json").unlink()
        (run.data / "acts" / "attempt").rmdir()
        with pytest.raises(StorageError, match="acts/attempt"):
            committer.publish([receipt])
        assert committer.committed == set()
