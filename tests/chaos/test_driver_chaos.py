"""Seeded SIGKILLs over engine actors and drivers: the resumed run stores the bytes that an undisturbed one stores."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from storage.ledger import read_ledger
from storage.verify import verify
from tests.chaos.drive import make_scripted_run

pytestmark = pytest.mark.chaos

DRIVER_KILLS = int(os.environ.get("HARVEST_CHAOS_DRIVER_KILLS", "6"))
ENGINE_KILLS_A_DRIVER = 5
UNITS_A_DRIVER = 25


def test_kills_of_engines_and_drivers(tmp_path):
    rng = random.Random(11)
    # Enough work for all of the kills: a driver commits a few units between two of them.
    n_units = UNITS_A_DRIVER * DRIVER_KILLS
    size = {"n_units": n_units, "n_prompts": 10 * n_units}
    run = make_scripted_run(tmp_path / "run", **size)
    killed: set[int] = set()  # a process takes a moment to die, and counts once
    driver_kills = 0
    while driver_kills < DRIVER_KILLS and read_ledger(run.ledger).complete is None:
        driver = start(run.path, tmp_path)
        for _ in range(ENGINE_KILLS_A_DRIVER):
            pid = wait_for_engine(run.events, driver, killed)
            time.sleep(rng.uniform(0.0, 0.6))
            if pid is not None and kill(pid):
                killed.add(pid)
        time.sleep(rng.uniform(0.0, 0.5))
        if driver.poll() is None:
            driver.kill()
            driver_kills += 1
        driver.wait()
        wait_until_gone(tmp_path)
    finisher = start(run.path, tmp_path)
    assert finisher.wait(300) == 0
    assert driver_kills == DRIVER_KILLS, "the run ended before its last kill: raise UNITS_A_DRIVER"
    assert len(killed) >= DRIVER_KILLS, "too few engines were hit to say anything"
    report = verify(run.path)
    assert report.ok, report.findings
    undisturbed = make_scripted_run(tmp_path / "undisturbed", **size)
    assert start(undisturbed.path, tmp_path).wait(300) == 0
    for path in sorted((undisturbed.data).rglob("*")):
        if path.is_file():
            assert (run.data / path.relative_to(undisturbed.data)).read_bytes() == path.read_bytes(), path
    units = [json.loads(line).get("unit") for line in run.ledger.read_text().splitlines()]
    committed = [unit for unit in units if unit is not None]
    assert sorted(committed) == list(range(run.layout.n_units))
    print(f"{len(killed)} engines and {driver_kills} drivers killed")


def start(run: Path, mark: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.chaos.drive", str(run)],
        env={**os.environ, "HARVEST_CHAOS_MARK": str(mark)},
        cwd=Path(__file__).parents[2],
    )


def wait_for_engine(events: Path, driver: subprocess.Popen[bytes], killed: set[int]) -> int | None:
    """The process id of an engine that is ready now and was not killed before."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and driver.poll() is None:
        lines = events.read_text().splitlines() if events.exists() else []
        ready = [json.loads(line)["pid"] for line in lines if '"engine_ready"' in line]
        ready = [pid for pid in ready if pid not in killed]
        living = [pid for pid in ready if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]
        if living:
            return living[-1]
        time.sleep(0.05)
    return None


def kill(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def wait_until_gone(mark: Path) -> None:
    """Nothing of a killed driver may be left."""
    deadline = time.monotonic() + 60
    while True:
        left = [process for process in psutil.process_iter() if _is_marked(process, mark)]
        if not left:
            return
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.2)


def _is_marked(process: psutil.Process, mark: Path) -> bool:
    try:
        return process.environ().get("HARVEST_CHAOS_MARK") == str(mark)
    except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
        return False
