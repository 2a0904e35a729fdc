"""200 SIGKILLs over writers and drivers, at every kind of step from making the run to finalising it.

Nothing is torn, lost, doubled or mixed, and the resumed run equals an undisturbed one, file by file.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage.ledger import read_ledger
from storage.run_folder import RunFolder
from storage.testing import ATTEMPT, ScriptedRun
from tests.chaos.processes import Death, deaths_file, run_until_killed

KILLS = int(os.environ.get("HARVEST_CHAOS_KILLS", "200"))


@pytest.fixture
def folder() -> Iterator[Path]:
    shared = Path("/dev/shm")
    path = Path(tempfile.mkdtemp(prefix="harvest-chaos-", dir=shared if shared.is_dir() else None))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def same_store(one: Path, other: Path) -> None:
    """All files of two stores are equal, but for the location that records the attempt."""
    files = sorted(path.relative_to(one) for path in one.rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(other) for path in other.rglob("*") if path.is_file())
    for file in files:
        if not str(file).startswith(f"{ATTEMPT}/c."):
            assert (one / file).read_bytes() == (other / file).read_bytes(), file


def draw_death(rng: random.Random) -> Death:
    """A moment to die: early steps are drawn as often as late ones."""
    victim = rng.choice(("driver", "writer"))
    most = 260 if victim == "driver" else 90
    return Death(victim=victim, step=rng.randint(1, most), when=rng.choice(("before", "after", "middle")))


def kill_and_resume(folder: Path, seed: int, kills: int) -> int:
    """Kill one run `kills` times, finish it, compare; returns how many processes died."""
    rng = random.Random(seed)
    script = ScriptedRun(
        seed=seed,
        n_units=4,
        rows_per_shard=64,
        shards_per_unit=rng.choice((1, 2)),
        compression=rng.choice((None, None, "zstd")),
    )
    path = folder / f"run-{seed}"
    committed: dict[int, int] = {}
    struck = 0
    for kill in range(kills):
        by_time = rng.random() < 0.25
        finished = run_until_killed(
            script,
            path,
            death=None if by_time else draw_death(rng),
            after_s=rng.uniform(0, 0.15) if by_time else None,
            seed=seed * 1000 + kill,
        )
        struck += not finished
        if (path / "run.json").exists() and (path / "ledger.jsonl").exists():
            units = {unit: x.attempt for unit, x in read_ledger(path / "ledger.jsonl").units.items()}
            assert committed.items() <= units.items(), "a committed unit was lost or replaced"
            committed = units
            script.assert_units(RunFolder.open(path))
        if finished and committed and len(committed) == script.n_units:
            break
    assert run_until_killed(script, path, death=None, after_s=None, seed=seed)
    run = RunFolder.open(path)
    script.assert_store(run)
    calm = script.create(folder / f"calm-{seed}")
    script.finish(calm)
    same_store(run.data, calm.data)
    shutil.rmtree(path)
    shutil.rmtree(calm.path)
    deaths = deaths_file(path)
    return struck + (deaths.stat().st_size if deaths.exists() else 0)


@pytest.mark.chaos
def test_kills_of_writers_and_drivers(folder: Path) -> None:
    struck = seed = 0
    while struck < KILLS:
        struck += kill_and_resume(folder, seed, kills=8)
        seed += 1
    print(f"{struck} processes killed over {seed} runs")


def test_a_few_kills(folder: Path) -> None:
    """The same, briefly, in every test run."""
    assert sum(kill_and_resume(folder, seed, kills=4) for seed in range(1000, 1003))
