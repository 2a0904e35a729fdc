"""The single committer of a run: lock, recovery, publication, finalising.

Order of publication, which makes a unit visible wholly or not at all whatever is lost in a crash: the attempt's files
are durable (sealed with fsync) → renamed into the store → their folders synced → receipts appended and synced →
ledger lines appended and synced. **Visible means: in the ledger.** A unit that was renamed but not recorded is
ignored by readers and overwritten, file by file, by the next attempt, since every attempt at a unit makes the same
set of files.

An attempt number is `incarnation x ATTEMPTS + n`: each opening of the run is an incarnation, recorded in the ledger, so
numbers never repeat and a receipt of an earlier driver's attempt is recognised and dropped.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from storage.errors import ReceiptError, RunLockedError, StorageError, WriteError
from storage.files import (
    digest,
    lock_file,
    make_folder,
    remove_tree,
    rename,
    replace_file,
    sync_folder,
    unlock_file,
    write_file,
)
from storage.ledger import AppendFile, CommittedUnit, LedgerWriter, read_ledger
from storage.receipt import InvokeReceipt, UnitReceipt, as_invoke_receipts, expected_mask_crcs
from storage.receipts_file import read_content
from storage.run_folder import RunFolder, staging_folder
from storage.run_index import RunSummary
from storage.stats import LocationStatistics

_SYNCS = 8
ATTEMPTS = 100_000
"""Attempts that one incarnation may number for one unit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Published:
    """What `publish` did: units now visible, receipts dropped (late twins, earlier incarnations), receipts refused."""

    committed: tuple[int, ...] = ()
    dropped: tuple[tuple[int, int], ...] = ()
    refused: dict[tuple[int, int], str] = field(default_factory=dict)


class Committer:
    """The one process that may change a run's store. Use as a context manager, or `close` it. Not thread-safe."""

    def __init__(self, run: RunFolder, lock: int) -> None:
        self.run = run
        self._lock = lock
        state = read_ledger(run.ledger)
        self._receipts = AppendFile(run.receipts, keep_bytes=state.receipts_bytes)
        self._ledger = LedgerWriter(run.ledger, state)
        sync_folder(run.path)  # the file of receipts may be new, and the ledger is about to point into it
        self._units = dict(state.units)
        self._complete = state.complete
        self._attempts: dict[int, int] = {}
        # Unit -> the attempt whose files were the last to be renamed into the store, while it is not in the ledger.
        self._renamed: dict[int, int] = {}
        self.incarnation = state.incarnation
        remove_tree(run.path / ".creating")
        remove_tree(run.staging)
        make_folder(run.staging)
        if self._complete is None:
            remove_tree(run.data / "index")
            self.incarnation += 1
            self._ledger.append([{"open": self.incarnation}])

    @classmethod
    def open(cls, run: RunFolder, *, wait_s: float = 1.0) -> Committer:
        """Take the driver's lock and recover from whatever the last driver left.

        `wait_s` is how long a lock held by another is waited for: a child that a dying driver was just forking holds
        it for a moment. Stale staging is deleted and a torn tail of the ledger dropped. Raises `RunLockedError` while
        another driver holds the run, `LedgerError` where the ledger is damaged.
        """
        lock = lock_file(run.lock, wait_s=wait_s)
        if lock is None:
            holder = run.lock.read_text().strip() or "unknown"
            raise RunLockedError(
                f"Another driver ({holder}) holds the run at {run.path}. Wait for it, or end it first."
            )
        try:
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"pid {os.getpid()} on {socket.gethostname()}".encode(), 0)
            return cls(run, lock)
        except BaseException:
            unlock_file(lock)
            raise

    @property
    def committed(self) -> set[int]:
        """Numbers of the committed units; a copy."""
        return set(self._units)

    @property
    def complete(self) -> bool:
        """Whether the run is finalised."""
        return self._complete is not None

    @property
    def units(self) -> Mapping[int, CommittedUnit]:
        """What the ledger says of each committed unit."""
        return self._units

    def next_attempt(self, unit: int) -> int:
        """A number for the next attempt at `unit`, never given before, not even by an earlier driver."""
        self.run.layout.shards_of(unit)
        count = self._attempts.get(unit, 0) + 1
        if count >= ATTEMPTS:
            raise StorageError(
                f"Unit {unit} was attempted {count} times by this driver. See why its attempts fail; the same command "
                "then resumes the run."
            )
        self._attempts[unit] = count
        return self.incarnation * ATTEMPTS + count

    def publish(self, receipts: Sequence[UnitReceipt]) -> Published:
        """Make the units of `receipts` visible, with one round of fsyncs for all of them.

        A receipt for a committed unit, or of an earlier incarnation, is dropped with its staged files. One that does
        not describe its unit (files or rows missing, invokes other than planned) is refused with the reason and its
        files are deleted; the others go on. After `WriteError` nothing of the group is visible;
        publish the same receipts again once the cause is gone, or attempt the units again.
        """
        dropped: list[tuple[int, int]] = []
        refused: dict[tuple[int, int], str] = {}
        accepted: dict[int, UnitReceipt] = {}
        for receipt in receipts:
            name = (receipt.unit, receipt.attempt)
            stale = receipt.attempt // ATTEMPTS != self.incarnation
            if self._complete is not None or stale or receipt.unit in self._units or receipt.unit in accepted:
                dropped.append(name)
                continue
            try:
                self._check(receipt)
            except ReceiptError as error:
                refused[name] = str(error)
                continue
            accepted[receipt.unit] = receipt
        if accepted:
            self._publish(list(accepted.values()))
        for unit, attempt in (*dropped, *refused):
            if accepted.get(unit) is None or accepted[unit].attempt != attempt:
                self.drop_staging(unit, attempt)
        return Published(committed=tuple(accepted), dropped=tuple(dropped), refused=refused)

    def drop_staging(self, unit: int, attempt: int) -> None:
        """Delete what an attempt staged; call it for attempts that are known to be over."""
        remove_tree(staging_folder(self.run.path, unit, attempt))

    def finalise(self, results: Iterable[InvokeReceipt] = ()) -> None:
        """Write `index/*` and `statistics.json` and record the run as complete.

        `results` overrides what receipts say of an invoke (for one quarantined afterwards, say). Raises `StorageError`
        while units are missing. Harmless when the run is complete.
        """
        if self._complete is not None:
            return
        missing = self.run.layout.n_units - len(self._units)
        if missing:
            raise StorageError(
                f"{missing} of {self.run.layout.n_units} units are not committed yet; nothing finalised."
            )
        summary = RunSummary(self.run)
        for unit in sorted(self._units):
            content = read_content(self.run, self._units[unit])
            statistics = {name: LocationStatistics.from_json(x) for name, x in content["statistics"].items()}
            summary.add_unit(unit, as_invoke_receipts(content["invokes"]), statistics)
        for ended in results:
            summary.add_invoke(ended)
        staged = self.run.staging / "index"
        remove_tree(staged)
        digests: dict[str, list[Any]] = {}
        for name, data in summary.index_files().items():
            path = staged / name.removeprefix("index/")
            make_folder(path.parent)
            write_file(path, data)
            digests[f"data.zarr/{name}"] = [len(data), digest(data)]
        for folder in sorted({(staged / name.removeprefix("data.zarr/index/")).parent for name in digests}):
            sync_folder(folder)
        sync_folder(staged)
        rename(staged, self.run.data / "index")
        sync_folder(self.run.data)
        document = summary.statistics_document()
        replace_file(self.run.statistics, document)
        digests["statistics.json"] = [len(document), digest(document)]
        complete = {"units": len(self._units), "files": digests}
        self._ledger.append([{"complete": complete}])
        self._complete = complete
        remove_tree(self.run.staging)

    def close(self) -> None:
        """Release the run; harmless when closed."""
        self._ledger.close()
        self._receipts.close()
        unlock_file(self._lock)

    def __enter__(self) -> Committer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _publish(self, receipts: list[UnitReceipt]) -> None:
        folders: set[Path] = set()
        for receipt in receipts:
            resumed = self._renamed.get(receipt.unit) == receipt.attempt
            self._renamed[receipt.unit] = receipt.attempt
            staged = staging_folder(self.run.path, receipt.unit, receipt.attempt)
            for file in receipt.files:
                name = self.run.layout.arrays[file.array].file(file.shard)
                if not resumed or (staged / name).exists():
                    rename(staged / name, self.run.data / name)
                folders.add((self.run.data / name).parent)
        # Side by side: a file system that is asked for several syncs at once shares the work between them.
        with ThreadPoolExecutor(min(_SYNCS, len(folders))) as pool:
            list(pool.map(sync_folder, sorted(folders)))
        data = b""
        units = []
        for receipt in receipts:
            line = json.dumps(receipt.to_json(), separators=(",", ":")).encode() + b"\n"
            units.append(
                CommittedUnit(
                    unit=receipt.unit,
                    attempt=receipt.attempt,
                    rows=receipt.rows,
                    total_bytes=receipt.total_bytes,
                    receipt_offset=self._receipts.end + len(data),
                    receipt_bytes=len(line),
                    receipt_digest=digest(line),
                )
            )
            data += line
        self._receipts.append(data)
        try:
            self._ledger.append([_ledger_line(unit) for unit in units])
        except WriteError:
            self._receipts.take_back(len(data))
            raise
        self._units |= {unit.unit: unit for unit in units}
        for receipt in receipts:
            try:
                self.drop_staging(receipt.unit, receipt.attempt)
            except WriteError:
                continue  # an empty folder; the next opening deletes it

    def _check(self, receipt: UnitReceipt) -> None:
        """Refuse a receipt that does not account for every file, invoke and row of its unit."""
        layout = self.run.layout
        name = f"Attempt {receipt.attempt} at unit {receipt.unit}"
        files = {(file.array, file.shard): file for file in receipt.files}
        wanted: set[tuple[str, int]] = set(layout.unit_files(receipt.unit))
        if set(files) != wanted or len(receipt.files) != len(wanted):
            some = sorted(wanted.symmetric_difference(files))[:3]
            raise ReceiptError(f"{name} has missing or foreign files: {some}.")
        staged = staging_folder(self.run.path, receipt.unit, receipt.attempt)
        for (array, shard), file in files.items():
            path = staged / layout.arrays[array].file(shard)
            if self._renamed.get(receipt.unit) == receipt.attempt and not path.exists():
                path = self.run.data / layout.arrays[array].file(shard)
            size = path.stat().st_size if path.exists() else -1
            if size != file.file_bytes:
                raise ReceiptError(f"{name}: {path} has {size} bytes where the receipt says {file.file_bytes}.")
        plan = self.run.plan.read_unit(
            receipt.unit, columns=["invoke", "row_start", "n_rows", "max_tokens"]
        ).to_pydict()
        told = {x.invoke: x for x in receipt.invokes}
        if set(told) != set(plan["invoke"]) or len(told) != len(receipt.invokes):
            differ = sorted(set(told).symmetric_difference(plan["invoke"]))[:3]
            raise ReceiptError(f"{name} does not say how every planned invoke ended, once each (see invokes {differ}).")
        for invoke, reserved, max_tokens in zip(plan["invoke"], plan["n_rows"], plan["max_tokens"], strict=True):
            one = told[invoke]
            if one.n_rows > reserved or (one.status == "ok" and max_tokens <= 1 and one.n_rows != reserved):
                raise ReceiptError(
                    f"{name}: invoke {invoke} stored {one.n_rows} rows and says {one.status!r}; {reserved} are planned."
                )
        first_row = layout.rows_of(receipt.unit).start
        masks = expected_mask_crcs(
            n_shards=layout.shards_per_unit,
            rows_per_shard=layout.rows_per_shard,
            starts=[start - first_row for start in plan["row_start"]],
            counts=[told[invoke].n_rows for invoke in plan["invoke"]],
        )
        for shard, mask in zip(layout.shards_of(receipt.unit), masks, strict=True):
            wrong = [array for array in layout.arrays if files[array, shard].mask_crc != mask]
            if wrong:
                raise ReceiptError(
                    f"{name}: the rows written in shard {shard} of {', '.join(wrong)} are not the rows of its invokes."
                )


def _ledger_line(unit: CommittedUnit) -> dict[str, Any]:
    return {
        "unit": unit.unit,
        "attempt": unit.attempt,
        "rows": unit.rows,
        "bytes": unit.total_bytes,
        "receipt": [unit.receipt_offset, unit.receipt_bytes, unit.receipt_digest],
    }
