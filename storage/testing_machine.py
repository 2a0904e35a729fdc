"""A hypothesis state machine over the store, against a model of a few plain sets.

It plans, writes, clears, seals, publishes alone and in groups, late and twice, lets attempts race, kills drivers,
tears the ledger's end, reads while it goes, and at the end resumes whatever is left and compares with an undisturbed
run. Subclass it as a test: `TestStore = StoreMachine.TestCase`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from storage.commit import Committer
from storage.errors import NotCommittedError, RowError, RunFolderError, RunLockedError, StorageError
from storage.ledger import read_ledger
from storage.reader import StoreReader
from storage.receipt import UnitReceipt
from storage.run_folder import RunFolder
from storage.testing import ATTEMPT, ScriptedRun
from storage.unit_writer import UnitWriter
from storage.verify import verify

Name = tuple[int, int]


class StoreMachine(RuleBasedStateMachine):
    """The store as drivers, engines and readers use it. The model: which units are committed, by which attempt."""

    def __init__(self) -> None:
        super().__init__()
        shared = Path("/dev/shm")
        self.home = Path(tempfile.mkdtemp(prefix="harvest-machine-", dir=shared if shared.is_dir() else None))
        self.path = self.home / "run"
        self.driver: Committer | None = None
        self.committed: dict[int, int] = {}
        self.ever_given: set[Name] = set()
        self.writers: dict[Name, tuple[UnitWriter, list[tuple[str, int, Any]]]] = {}
        self.receipts: dict[Name, UnitReceipt] = {}
        self.current: set[Name] = set()  # attempts numbered by the driver that is alive
        self.complete = False

    @initialize(seed=st.integers(0, 50), zstd=st.booleans(), shards=st.integers(1, 2), interrupted=st.booleans())
    def plan(self, seed: int, zstd: bool, shards: int, interrupted: bool) -> None:
        """Make the run, perhaps at the second try."""
        self.script = ScriptedRun(
            seed=seed, n_units=3, rows_per_shard=64, shards_per_unit=shards, compression="zstd" if zstd else None
        )
        if interrupted:
            run = self.script.create(self.path)
            (run.path / ".creating").write_text("")
            (run.path / "run.json").unlink()
        self.run = self.script.create(self.path)
        try:
            self.script.create(self.path)
        except RunFolderError:
            return
        raise AssertionError("a run was made over another")

    @precondition(lambda self: self.driver is None)
    @rule()
    def start_driver(self) -> None:
        """A driver takes the run and finds what the ledger says."""
        self.driver = Committer.open(RunFolder.open(self.path))
        self.current = set()
        assert self.driver.committed == set(self.committed)
        assert self.driver.complete == self.complete
        # What was being written belongs to nobody now; its files are gone from the folder, its descriptors still work.
        assert self.complete or not any(self.run.staging.iterdir())

    @precondition(lambda self: self.driver is not None)
    @rule()
    def refuse_a_second_driver(self) -> None:
        """One driver at a time."""
        try:
            Committer.open(RunFolder.open(self.path), wait_s=0)
        except RunLockedError:
            return
        raise AssertionError("two drivers hold one run")

    @precondition(lambda self: self.driver is not None)
    @rule(torn=st.binary(max_size=40), times=st.integers(1, 20), stray=st.booleans())
    def kill_driver(self, torn: bytes, times: int, stray: bool) -> None:
        """The driver dies, perhaps in the middle of an append, perhaps between renames and the ledger."""
        assert self.driver is not None
        self.driver.close()  # the kernel does as much for a killed process
        self.driver = None
        with self.run.ledger.open("ab") as file:
            file.write(torn.replace(b"\n", b"") * times)
        with self.run.receipts.open("ab") as file:
            file.write(torn)
        sealed = [name for name in self.receipts if name[0] not in self.committed and self.staged(name)]
        if stray and sealed:
            unit, attempt = sealed[0]
            array = next(iter(self.run.layout.arrays.values()))
            name = array.file(self.run.layout.shards_of(unit).start)
            os.rename(self.path / ".staging" / f"{unit}-{attempt}" / name, self.run.data / name)

    def staged(self, name: Name) -> bool:
        return (self.path / ".staging" / f"{name[0]}-{name[1]}" / "acts").is_dir()

    @precondition(lambda self: self.driver is not None and not self.complete)
    @rule(unit=st.integers(0, 2))
    def lease(self, unit: int) -> None:
        """An engine begins an attempt; its number is new."""
        assert self.driver is not None
        name = (unit, self.driver.next_attempt(unit))
        assert name not in self.ever_given
        self.ever_given.add(name)
        self.current.add(name)
        writer = UnitWriter(self.path, self.run.layout, unit=unit, attempt=name[1])
        self.writers[name] = (writer, self.script.writes(*name))

    @precondition(lambda self: self.driver is not None and not self.complete)
    @rule(unit=st.integers(0, 2), other=st.booleans())
    def whole_attempts(self, unit: int, other: bool) -> None:
        """One attempt from lease to receipt, or two that race."""
        for _ in range(1 + other):
            self.lease(unit)
            name = max(self.writers, key=lambda name: (name[0] == unit, name[1]))
            writer, calls = self.writers.pop(name)
            *most, last = [call for call in calls if len(call[2])]
            for array, row, rows in most:
                writer.write(array, row, rows)
            if most:
                self.refused(lambda w=writer, call=most[-1]: w.write(*call))  # type: ignore[misc]
            self.refused(lambda w=writer: w.seal())  # type: ignore[misc]
            writer.write(*last)
            self.receipts[name] = writer.seal(invokes=self.script.outcomes(unit))

    def refused(self, action: Callable[[], object]) -> None:
        """`action` must fail for its rows."""
        try:
            action()
        except RowError:
            return
        raise AssertionError("rows written twice, or missing, were accepted")

    def some_writer(self, data: st.DataObject) -> Name:
        return data.draw(st.sampled_from(sorted(self.writers)))

    @precondition(lambda self: self.writers)
    @rule(data=st.data(), share=st.sampled_from([0.3, 1.0]))
    def write(self, data: st.DataObject, share: float) -> None:
        """Some of an attempt's rows; some are given back and written again, some written twice in vain."""
        writer, calls = self.writers[self.some_writer(data)]
        for _ in range(int(len(calls) * share)):
            array, row, rows = calls.pop()
            writer.write(array, row, rows)
        if calls or not share:
            return
        if data.draw(st.booleans()) and writer.written(ATTEMPT):
            row = int(np.argmax(writer.mask(ATTEMPT)))
            value = np.full((1, 2), writer.attempt, np.float32)
            try:
                writer.write(ATTEMPT, row, value)
            except RowError:
                writer.clear(ATTEMPT, row, 1)
                writer.write(ATTEMPT, row, value)
            else:
                raise AssertionError("a row was written twice")

    @precondition(lambda self: self.writers)
    @rule(data=st.data())
    def seal(self, data: st.DataObject) -> None:
        """Finish an attempt; one whose rows are not all there is refused, and goes on."""
        name = self.some_writer(data)
        writer, calls = self.writers[name]
        expected = sum(x.n_rows for x in self.script.of_unit(name[0]))
        try:
            receipt = writer.seal(expected_rows=expected, invokes=self.script.outcomes(name[0]))
        except RowError:
            assert any(len(rows) for _, _, rows in calls)
            return
        assert not any(len(rows) for _, _, rows in calls)
        del self.writers[name]
        self.receipts[name] = receipt

    @precondition(lambda self: self.writers)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """An engine gives up."""
        writer, _ = self.writers.pop(self.some_writer(data))
        writer.abort()

    @precondition(lambda self: self.driver is not None and self.receipts)
    @rule(data=st.data(), n=st.integers(1, 3))
    def publish(self, data: st.DataObject, n: int) -> None:
        """Receipts arrive, in any order, late, twice, of dead drivers."""
        assert self.driver is not None
        names = data.draw(st.lists(st.sampled_from(sorted(self.receipts)), min_size=1, max_size=n, unique=True))
        self.publish_these(names)

    def publish_these(self, names: list[Name]) -> None:
        """Publish the receipts of `names` and hold the answer against the model."""
        assert self.driver is not None
        published = self.driver.publish([self.receipts[name] for name in names])
        assert not published.refused, published.refused
        for name in names:
            if name[0] in self.committed or name not in self.current:
                assert name in published.dropped
            else:
                assert name[0] in published.committed
                self.committed[name[0]] = name[1]

    @precondition(lambda self: self.driver is not None and self.receipts)
    @rule()
    def publish_late(self) -> None:
        """Everything that cannot count any more: of committed units, and of drivers that are gone."""
        late = [name for name in self.receipts if name[0] in self.committed or name not in self.current]
        self.publish_these(late)

    @precondition(lambda self: self.driver is not None and not self.complete)
    @rule()
    def finalise(self) -> None:
        """Works exactly when all units are there."""
        assert self.driver is not None
        try:
            self.driver.finalise()
        except StorageError:
            assert len(self.committed) < 3
        else:
            assert len(self.committed) == 3
            self.complete = True

    @rule()
    def read(self) -> None:
        """A reader sees the committed units, whole, of one attempt, and nothing else."""
        reader = StoreReader(RunFolder.open(self.path))
        assert reader.committed == set(self.committed)
        for unit in range(3):
            rows = self.run.layout.rows_of(unit)
            try:
                attempts = reader.array(ATTEMPT, rows)
            except NotCommittedError:
                assert unit not in self.committed
                continue
            assert set(np.unique(attempts).tolist()) <= {0.0, float(np.float32(self.committed[unit]))}
        reader.close()
        self.script.assert_units(self.run)

    @rule()
    def check(self) -> None:
        """`verify` finds nothing but what a dead driver left at the ends of the logs."""
        damage = {finding.path for finding in verify(self.path).findings if finding.severity == "damage"}
        assert damage <= (set() if self.driver is not None else {"ledger.jsonl", "receipts.jsonl"})

    @invariant()
    def ledger_agrees(self) -> None:
        """The ledger says what the model says."""
        if self.path.exists() and (self.path / "ledger.jsonl").exists():
            state = read_ledger(self.path / "ledger.jsonl")
            assert {unit: x.attempt for unit, x in state.units.items()} == self.committed

    def teardown(self) -> None:
        """Whatever happened: the same command finishes the run, and it equals an undisturbed one."""
        try:
            if self.driver is not None:
                self.driver.close()
            if (self.path / "run.json").exists():
                self.script.finish(RunFolder.open(self.path))
                self.script.assert_store(RunFolder.open(self.path))
        finally:
            for writer, _ in self.writers.values():
                writer.abort()
            shutil.rmtree(self.home, ignore_errors=True)
