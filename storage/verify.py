"""`verify`: is a run on disk what was written, whole, and does it agree with its plan?

Needs nothing but the run folder. It goes through everything that carries information: `run.json`, all files with a
recorded digest, the ledger, the receipts, every byte of every committed shard, the labels against the plan's token
ids, the row counts, the statistics, and files that are missing or that nobody knows. Findings name what is damaged;
it never repairs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from storage.errors import DamagedError, StorageError
from storage.files import digest
from storage.format import StoreLayout
from storage.label_check import label_problems, plan_problems
from storage.ledger import LedgerState, read_ledger
from storage.receipt import UnitReceipt
from storage.receipts_file import read_receipt
from storage.run_folder import RunFolder
from storage.shard_check import shard_problems
from storage.stats import LocationStatistics, RowStatistics

Severity = Literal["damage", "warning", "note"]
_BESIDE = frozenset(
    {"run.json", "ledger.jsonl", "receipts.jsonl", "events.jsonl", "profile.json", "report.html", ".lock"}
)
_BESIDE_FOLDERS = frozenset({".staging", "logs", "exports"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Something `verify` saw. `path` is relative to the run; only severity "damage" makes the run fail.

    `kind`: "missing", "damaged", "stray", "rows", "labels", "values", "statistics" or "incomplete".
    """

    severity: Severity
    kind: str
    path: str
    message: str
    unit: int | None = None

    def __str__(self) -> str:
        where = f" (unit {self.unit})" if self.unit is not None else ""
        return f"{self.severity}: {self.path}{where}: {self.message}"


@dataclass(kw_only=True)
class VerifyReport:
    """What `verify` looked at and found."""

    run: str
    complete: bool = False
    units_planned: int = 0
    units_committed: int = 0
    files_checked: int = 0
    bytes_checked: int = 0
    rows_checked: int = 0
    seconds: float = 0.0
    findings: list[Finding] = field(default_factory=list)

    @property
    def damaged(self) -> bool:
        """Whether anything is not what was written."""
        return any(finding.severity == "damage" for finding in self.findings)

    @property
    def ok(self) -> bool:
        """Whether the run is sound, so far as it is committed."""
        return not self.damaged

    def to_json(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return {**asdict(self), "ok": self.ok}


def verify(
    run: Path | str,
    *,
    threads: int = 2,
    statistics: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> VerifyReport:
    """Check the run at `run` and report; damage is a finding, never an exception.

    `statistics` recomputes each location's statistics from the stored rows. `progress` is called with (units done,
    units to do). Raises `RunFolderError` or `FormatError` where there is no run that this version reads.
    """
    began = time.monotonic()
    path = Path(run)
    report = VerifyReport(run=str(path))
    try:
        folder = RunFolder.open(path)
    except DamagedError as error:
        report.findings.append(Finding(severity="damage", kind="damaged", path="run.json", message=str(error)))
        return report
    report.units_planned = folder.layout.n_units
    check = _Check(folder=folder, report=report, statistics=statistics)
    check.whole_files(folder.files)
    state = check.ledger()
    check.plan()
    if state is not None:
        check.units(state, threads=threads, progress=progress)
        if state.complete is not None:
            check.whole_files({name: (size, value) for name, (size, value) in state.complete["files"].items()})
        check.strays(state)
    report.findings.sort(key=lambda finding: (finding.severity, finding.path, finding.message))
    report.seconds = time.monotonic() - began
    return report


@dataclass(kw_only=True)
class _UnitResult:
    findings: list[Finding] = field(default_factory=list)
    files: int = 0
    bytes: int = 0
    rows: int = 0


@dataclass(kw_only=True)
class _Check:
    folder: RunFolder
    report: VerifyReport
    statistics: bool

    def add(self, severity: Severity, kind: str, path: str, message: str) -> None:
        self.report.findings.append(Finding(severity=severity, kind=kind, path=path, message=message))

    def whole_files(self, files: dict[str, tuple[int, str]]) -> None:
        """Files whose digest is on record."""
        for name, (size, expected) in sorted(files.items()):
            try:
                content = (self.folder.path / name).read_bytes()
            except FileNotFoundError:
                self.add("damage", "missing", name, "the file is missing")
                continue
            except OSError as error:
                self.add("damage", "damaged", name, f"the file cannot be read ({error.strerror})")
                continue
            self.report.files_checked += 1
            self.report.bytes_checked += len(content)
            if len(content) != size or digest(content) != expected:
                self.add("damage", "damaged", name, "the content is not what was written")

    def ledger(self) -> LedgerState | None:
        """The ledger and the file of receipts as wholes."""
        try:
            state = read_ledger(self.folder.ledger)
        except StorageError as error:
            self.add("damage", "damaged", "ledger.jsonl", str(error))
            return None
        self.report.complete = state.complete is not None
        self.report.units_committed = len(state.units)
        if state.torn:
            self.add("damage", "damaged", "ledger.jsonl", "its end is torn or damaged; resuming redoes those units")
        planned = self.folder.layout.n_units
        if any(not 0 <= unit < planned for unit in state.units):
            self.add("damage", "rows", "ledger.jsonl", "it commits units that the plan does not have")
        if state.complete is None:
            self.add(
                "note", "incomplete", "ledger.jsonl", f"{len(state.units)} of {planned} units committed, not finalised"
            )
        size = self.folder.receipts.stat().st_size if self.folder.receipts.exists() else 0
        if size != state.receipts_bytes:
            message = f"it has {size} bytes where the ledger accounts for {state.receipts_bytes}"
            # A driver that died between receipts and ledger leaves bytes behind that the next one cuts off.
            severity: Severity = "damage" if state.complete is not None or size < state.receipts_bytes else "warning"
            self.add(severity, "damaged", "receipts.jsonl", message)
        return state

    def plan(self) -> None:
        """The plan's arithmetic; its bytes are checked by digest."""
        try:
            problems = list(plan_problems(self.folder.layout, self.folder.plan.summary(), self.folder.plan.skipped()))
        except (StorageError, OSError, ValueError) as error:  # pyarrow's errors are ValueErrors or OSErrors
            self.add("damage", "damaged", "plan", str(error))
            return
        for problem in problems:
            self.add("damage", "rows", "plan", problem)

    def units(self, state: LedgerState, *, threads: int, progress: Callable[[int, int], None] | None) -> None:
        """Every committed unit."""
        with ThreadPoolExecutor(max_workers=max(1, threads)) as pool:
            numbers = sorted(unit for unit in state.units if 0 <= unit < self.folder.layout.n_units)
            for done, result in enumerate(pool.map(lambda unit: self.unit(state, unit), numbers), start=1):
                self.report.findings += result.findings
                self.report.files_checked += result.files
                self.report.bytes_checked += result.bytes
                self.report.rows_checked += result.rows
                if progress is not None:
                    progress(done, len(numbers))

    def unit(self, state: LedgerState, unit: int) -> _UnitResult:
        """One unit: receipt, files, labels, statistics."""
        result = _UnitResult()

        def add(kind: str, path: str, message: str, severity: Severity = "damage") -> None:
            result.findings.append(Finding(severity=severity, kind=kind, path=path, message=message, unit=unit))

        try:
            receipt = read_receipt(self.folder, state.units[unit])
        except StorageError as error:
            add("damaged", "receipts.jsonl", str(error))
            return result
        layout = self.folder.layout
        wanted = set(layout.unit_files(unit))
        files = {(file.array, file.shard): file for file in receipt.files}
        if set(files) != wanted:
            add("rows", "receipts.jsonl", "the receipt does not list the files of its unit")
            return result
        labels = {
            path: np.full(layout.unit_rows, layout.arrays[path].fill, layout.arrays[path].native)
            for path in layout.token_arrays
        }
        gathered = {x.array: RowStatistics(rows=layout.unit_rows, dtype=x.dtype) for x in layout.locations}
        sound = True
        for (array, shard), file in sorted(files.items()):
            spec = layout.arrays[array]
            base = (shard - layout.shards_of(unit).start) * layout.rows_per_shard
            take: Callable[[int, np.ndarray[Any, Any]], None] | None = None
            if array in labels:
                take = _label_taker(labels[array], base)
            elif self.statistics:
                take = gathered[array].taker(base)
            for problem in shard_problems(self.folder.data / spec.file(shard), spec, file, take):
                kind = "missing" if problem == "the file is missing" else "damaged"
                add(kind, f"data.zarr/{spec.file(shard)}", problem)
                sound = False
            result.files += 1
            result.bytes += file.file_bytes
        if sound:
            for kind, path, message in self.rows(unit, receipt, labels, gathered):
                add(kind, path, message)
            result.rows = receipt.rows
        for name, value in sorted(receipt.statistics.items()):
            for severity, message in value_problems(value):
                add("values", f"data.zarr/acts/{name}", message, severity)
        return result

    def rows(
        self,
        unit: int,
        receipt: UnitReceipt,
        labels: dict[str, np.ndarray[Any, Any]],
        gathered: dict[str, RowStatistics],
    ) -> Iterator[tuple[str, str, str]]:
        """Row accounts, labels and statistics of a unit whose files are sound: (kind, path, message)."""
        mask = labels["tokens/invoke"] >= 0
        for file in receipt.files:
            if file.rows > self.folder.layout.rows_per_shard:
                yield "rows", "receipts.jsonl", f"{file.array} claims {file.rows} rows in one shard"
        if int(mask.sum()) != receipt.rows:
            yield "rows", "data.zarr/tokens/invoke", f"{int(mask.sum())} rows are labelled, {receipt.rows} committed"
        try:
            plan = self.folder.plan.read_unit(unit).to_pydict()
        except (StorageError, OSError, ValueError) as error:
            yield "damaged", "plan", str(error)
            return
        for problem in label_problems(self.folder.layout, receipt, plan, labels):
            yield "labels", "data.zarr/tokens", problem
        if not self.statistics:
            return
        for location in self.folder.layout.locations:
            now = gathered[location.array].finish(mask)
            then = receipt.statistics.get(location.name)
            if then is not None and not _same_statistics(now, then):
                yield "statistics", f"data.zarr/{location.array}", "the statistics are not those of the stored rows"

    def strays(self, state: LedgerState) -> None:
        """Files that nobody accounts for, and what a crash may have left."""
        layout = self.folder.layout
        known = set(self.folder.files) | _BESIDE
        if state.complete is not None:
            known |= set(state.complete["files"])
        for name in _walk(self.folder.path):
            if name in known or name.split("/", 1)[0] in _BESIDE_FOLDERS:
                continue
            unit = _unit_of(layout, name)
            if unit in state.units:
                continue
            unfinished = unit is not None or name.startswith("data.zarr/index/") or name == "statistics.json"
            if unfinished and state.complete is None:
                self.add("note", "stray", name, "left by work that was not committed; the next run replaces it")
            else:
                inside = name.startswith(("data.zarr/", "plan/"))
                self.add("damage" if inside else "note", "stray", name, "nothing accounts for this file")


def value_problems(value: LocationStatistics) -> Iterator[tuple[Severity, str]]:
    """What a location's statistics say against its rows: (severity, sentence)."""
    if value.nonfinite_rows:
        yield (
            "damage",
            f"{value.nonfinite_rows} rows hold NaN or infinity, the first is row {value.first_nonfinite_row}",
        )
    if value.rows and value.zero_rows == value.rows:
        yield "damage", f"all {value.rows} rows are zero"
    elif value.zero_rows:
        yield "warning", f"{value.zero_rows} of {value.rows} rows are all zero"


def _label_taker(target: np.ndarray[Any, Any], base: int) -> Callable[[int, np.ndarray[Any, Any]], None]:
    def take(row: int, chunk: np.ndarray[Any, Any]) -> None:
        target[base + row : base + row + len(chunk)] = chunk.reshape(-1).view(target.dtype)

    return take


def _same_statistics(now: LocationStatistics, then: LocationStatistics) -> bool:
    exact = ("rows", "zero_rows", "nonfinite_rows", "first_nonfinite_row", "max_abs", "largest")
    return all(getattr(now, name) == getattr(then, name) for name in exact)


def _unit_of(layout: StoreLayout, name: str) -> int | None:
    """The unit that owns the shard file at `name`, or None where it is no shard file of the layout."""
    array, _, key = name.removeprefix("data.zarr/").rpartition("/")
    spec = layout.arrays.get(array) if name.startswith("data.zarr/") else None
    number = key.split(".")[1] if key.count(".") else ""
    if spec is None or not number.isdigit() or spec.chunk_key(int(number)) != key or int(number) >= layout.n_shards:
        return None
    return int(number) // layout.shards_per_unit


def _walk(path: Path) -> Iterator[str]:
    for folder, _, files in os.walk(path):
        for name in files:
            yield os.path.relpath(os.path.join(folder, name), path)
