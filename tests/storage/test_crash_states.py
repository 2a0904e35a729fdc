"""Whatever POSIX lets a crash leave behind, ledgered units are whole and the same command finishes the run."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from unittest import mock

import pytest

from storage.commit import Committer
from storage.errors import StorageError
from storage.run_folder import RunFolder
from storage.testing import ScriptedRun
from storage.testing_crash import Recorder, crash_state

SCRIPT = ScriptedRun(seed=5, n_units=3, rows_per_shard=64, shards_per_unit=1)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recorder, list[tuple[int, set[int]]]]:
    """Every operation of a whole run that was interrupted once, and which units were promised after how many."""
    path = tmp_path_factory.mktemp("recorded") / "run"
    recorder = Recorder(path.parent)
    promises: list[tuple[int, set[int]]] = []
    with recorder.recording():
        run = SCRIPT.create(path)
        promises.append((len(recorder.operations), set()))
        with Committer.open(run) as committer:
            committer.publish([SCRIPT.attempt(run, 0, committer.next_attempt(0))])
            promises.append((len(recorder.operations), {0}))
            SCRIPT.attempt(run, 1, committer.next_attempt(1))  # sealed, never published
        with Committer.open(run) as committer:
            receipts = [SCRIPT.attempt(run, unit, committer.next_attempt(unit)) for unit in (1, 2)]
            committer.publish(receipts)
            promises.append((len(recorder.operations), {0, 1, 2}))
            committer.finalise()
    SCRIPT.assert_store(run)
    return recorder, promises


def check_state(recorded: tuple[Recorder, list[tuple[int, set[int]]]], end: int, seed: int, target: Path) -> None:
    recorder, promises = recorded
    crash_state(recorder.operations, end, target, random.Random(f"{end} {seed}"))
    path = target / "run"
    run = SCRIPT.open_or_create(path)
    promised = {unit for at, units in promises if at <= end for unit in units}
    with Committer.open(run) as committer:
        assert promised <= committer.committed
    SCRIPT.assert_units(run)
    SCRIPT.finish(RunFolder.open(path))
    SCRIPT.assert_store(RunFolder.open(path))


def test_recorder_sees_every_byte(recorded: tuple[Recorder, list[tuple[int, set[int]]]], folder: Path) -> None:
    """With everything kept the replayed folder is the real one."""
    recorder, _ = recorded
    everything = mock.Mock(random.Random(0))
    everything.choice.side_effect = lambda options: options[-1]
    everything.random.return_value = 0.5
    crash_state(recorder.operations, len(recorder.operations), folder / "state", everything)
    real = {p.relative_to(recorder.root): p.read_bytes() for p in recorder.root.rglob("*") if p.is_file()}
    replayed = {p.relative_to(folder / "state"): p.read_bytes() for p in (folder / "state").rglob("*") if p.is_file()}
    assert replayed == real


def test_crash_states_at_the_end_of_creation(
    recorded: tuple[Recorder, list[tuple[int, set[int]]]], folder: Path
) -> None:
    """The folder is a run or can become one in every state, also where `run.json` and the marker change places."""
    made = recorded[1][0][0]
    for end in range(made - 3, made + 1):
        for seed in range(12):
            target = folder / "state"
            check_state(recorded, end, seed, target)
            shutil.rmtree(target)


def test_crash_states_of_a_sample(recorded: tuple[Recorder, list[tuple[int, set[int]]]], folder: Path) -> None:
    operations = recorded[0].operations
    # Half of the crashes right after a change of a name: that is where the order of syncs matters.
    names = [i for i, x in enumerate(operations, start=1) if x.kind in ("rename", "remove")]
    rng = random.Random(1)
    for seed in range(60):
        target = folder / "state"
        end = rng.choice(names) if seed % 2 else rng.randint(1, len(operations))
        check_state(recorded, end, seed, target)
        shutil.rmtree(target)


@pytest.mark.chaos
def test_crash_states_at_every_operation(recorded: tuple[Recorder, list[tuple[int, set[int]]]], folder: Path) -> None:
    for end in range(1, len(recorded[0].operations) + 1):
        for seed in range(2):
            target = folder / "state"
            check_state(recorded, end, seed, target)
            shutil.rmtree(target)


def test_replay_shows_a_committer_that_does_not_sync(folder: Path) -> None:
    """The replay has teeth: without folder syncs before the ledger line, some allowed state loses a promised unit."""
    recorder = Recorder(folder / "real")
    with recorder.recording(), mock.patch("storage.commit.sync_folder"):
        run = SCRIPT.create(folder / "real" / "run")
        with Committer.open(run) as committer:
            committer.publish([SCRIPT.attempt(run, 0, committer.next_attempt(0))])
    broken = 0
    for seed in range(40):
        target = folder / "state"
        crash_state(recorder.operations, len(recorder.operations), target, random.Random(seed))
        try:
            SCRIPT.assert_units(RunFolder.open(target / "run"))
        except (AssertionError, StorageError):
            broken += 1
        shutil.rmtree(target)
    assert broken
