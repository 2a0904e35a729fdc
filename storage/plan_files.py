"""The plan on disk: which invoke lies where, as Parquet that any tool reads.

`plan/invokes-<nnnnn>.parquet` holds the units in order, one row group each, `UNITS_PER_FILE` a file, so one unit is
read without touching another. `plan/skipped.parquet` lists the invokes that were never planned, with the reason. The
files are written once, when the run is made; their digests are in `run.json`.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from storage.errors import DamagedError, FormatError, RunFolderError
from storage.files import digest, make_folder, sync_folder, write_file

UNITS_PER_FILE = 512

INVOKE_SCHEMA = pa.schema(
    [
        pa.field("invoke", pa.int64(), nullable=False),
        pa.field("key", pa.string()),
        pa.field("unit", pa.int32(), nullable=False),
        pa.field("row_start", pa.int64(), nullable=False),
        pa.field("n_rows", pa.int32(), nullable=False),
        pa.field("n_prompt_tokens", pa.int32(), nullable=False),
        pa.field("max_tokens", pa.int32(), nullable=False),
        pa.field("truncated", pa.bool_(), nullable=False),
        pa.field("token_ids", pa.list_(pa.int32()), nullable=False),
    ]
)
"""Columns of a planned invoke: `key` is the user's id, `row_start` counts over the whole store, `n_rows` is reserved,
`truncated` says that the prompt was cut to the model's length."""
SPANS_FIELD = pa.field("row_spans", pa.list_(pa.int32()))
"""A further column of plans that give rows to some roles of chat messages only: the prompt's tokens that belong to
them, as begin, end, begin, end, ..., ends exclusive, rising."""
SUMMARY_COLUMNS = [name for name in INVOKE_SCHEMA.names if name != "token_ids"]
SKIPPED_SCHEMA = pa.schema(
    [
        pa.field("invoke", pa.int64(), nullable=False),
        pa.field("key", pa.string()),
        pa.field("status", pa.string(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("detail", pa.string()),
    ]
)
SKIPPED_FILE = "skipped.parquet"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanSource:
    """A plan that is not on disk yet: one table of `INVOKE_SCHEMA` a unit, in order, and the skipped invokes.

    All tables have the column `SPANS_FIELD`, or none.
    """

    units: Iterable[pa.Table]
    skipped: pa.Table | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanFiles:
    """A written plan: its folder, counts, content hash, and (bytes, xxh3-128) of each file by name."""

    folder: Path
    hash: str
    n_units: int
    n_invokes: int
    n_skipped: int
    files: dict[str, tuple[int, str]]


def invoke_file(number: int) -> str:
    """Name of the `number`-th file of planned invokes."""
    return f"invokes-{number:05d}.parquet"


def write_plan(folder: Path, units: Iterable[pa.Table], skipped: pa.Table | None = None) -> PlanFiles:
    """Write a plan into `folder`, holding at most one file's units in memory.

    `units` yields one non-empty table of `INVOKE_SCHEMA` a unit, numbered 0, 1, … in their `unit` column, rows in order
    of place. `FormatError` names the unit that breaks this.
    """
    make_folder(folder)
    files: dict[str, tuple[int, str]] = {}
    n_units = n_invokes = 0
    sink: io.BytesIO | None = None
    writer: pq.ParquetWriter | None = None

    def finish(name: str) -> None:
        assert writer is not None and sink is not None
        writer.close()
        content = sink.getbuffer()
        write_file(folder / name, content)
        files[name] = (len(content), digest(content))

    schema = INVOKE_SCHEMA
    for unit, table in enumerate(units):
        if unit == 0 and SPANS_FIELD.name in table.column_names:
            schema = schema.append(SPANS_FIELD)
        table = _checked(table, unit, schema)
        if unit % UNITS_PER_FILE == 0:
            if unit:
                finish(invoke_file(unit // UNITS_PER_FILE - 1))
            sink = io.BytesIO()
            writer = pq.ParquetWriter(sink, schema, compression="zstd", use_dictionary=False)
        assert writer is not None
        writer.write_table(table, row_group_size=len(table))
        n_units += 1
        n_invokes += len(table)
    if n_units:
        finish(invoke_file((n_units - 1) // UNITS_PER_FILE))
    skipped = SKIPPED_SCHEMA.empty_table() if skipped is None else skipped.select(SKIPPED_SCHEMA.names)
    buffer = io.BytesIO()
    pq.write_table(skipped.cast(SKIPPED_SCHEMA), buffer, compression="zstd")
    write_file(folder / SKIPPED_FILE, buffer.getbuffer())
    files[SKIPPED_FILE] = (len(buffer.getbuffer()), digest(buffer.getbuffer()))
    sync_folder(folder)
    content_hash = digest("\n".join(f"{name} {value}" for name, (_, value) in sorted(files.items())).encode())
    return PlanFiles(
        folder=folder, hash=content_hash, n_units=n_units, n_invokes=n_invokes, n_skipped=len(skipped), files=files
    )


def _checked(table: pa.Table, unit: int, schema: pa.Schema) -> pa.Table:
    if "truncated" not in table.column_names:
        table = table.append_column("truncated", pa.array([False] * len(table), pa.bool_()))
    try:
        if set(table.column_names) - set(schema.names) == {SPANS_FIELD.name}:
            raise ValueError(f"{SPANS_FIELD.name}, which the units before do not have")
        table = table.select(schema.names).cast(schema).combine_chunks()
    except (KeyError, pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError) as error:
        raise FormatError(f"The plan of unit {unit} has other columns than a plan needs: {error}") from None
    if not len(table):
        raise FormatError(f"The plan of unit {unit} is empty; a unit holds at least one invoke.")
    numbers = set(table.column("unit").to_pylist())
    if numbers != {unit}:
        raise FormatError(f"The plan's table number {unit} belongs to units {sorted(numbers)}.")
    return table


class PlanReader:
    """Reads the plan in `folder`; keeps a few open files, so reading units in order or at random is cheap.

    Thread-safe: an open Parquet file is not, so reads take turns. Pickles as its folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file = lru_cache(maxsize=4)(self._open)
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[PlanReader], tuple[Path]]:
        return PlanReader, (self.folder,)

    def read_unit(self, unit: int, *, columns: list[str] | None = None) -> pa.Table:
        """The invokes of `unit`, in row order, columns of `INVOKE_SCHEMA`; no other unit is read.

        `SPANS_FIELD` is among them where the plan has it.
        """
        group = unit % UNITS_PER_FILE
        with self._reading(f"of unit {unit}"):
            file = self._file(unit // UNITS_PER_FILE)
            if unit < 0 or group >= file.num_row_groups:
                raise RunFolderError(f"Unit {unit} is not in the plan in {self.folder}.")
            return file.read_row_group(group, columns=columns, use_threads=False)

    def summary(self) -> pa.Table:
        """The whole plan without token ids as one table, in unit then row order."""
        tables = []
        for number in range(self._n_files()):
            with self._reading(f"file {number}"):
                tables.append(self._file(number).read(columns=SUMMARY_COLUMNS))
        return pa.concat_tables(tables) if tables else INVOKE_SCHEMA.empty_table().select(SUMMARY_COLUMNS)

    def skipped(self) -> pa.Table:
        """The invokes that were never planned, columns of `SKIPPED_SCHEMA`."""
        with self._reading("of skipped invokes"):
            return self._parquet(SKIPPED_FILE).read()

    def close(self) -> None:
        """Close the open files."""
        self._file.cache_clear()

    def _n_files(self) -> int:
        return len(list(self.folder.glob("invokes-*.parquet")))

    @contextmanager
    def _reading(self, what: str) -> Iterator[None]:
        with self._lock:
            try:
                yield
            except (pa.ArrowException, OSError) as error:
                raise DamagedError(f"The plan {what} in {self.folder} cannot be read: {error}") from error

    def _open(self, number: int) -> pq.ParquetFile:
        return self._parquet(invoke_file(number))

    def _parquet(self, name: str) -> Any:
        try:
            # Not mapped into memory: a file cut short under a mapping would kill the process.
            return pq.ParquetFile(self.folder / name)
        except FileNotFoundError:
            raise DamagedError(f"The plan file {self.folder / name} is missing. Restore it from a copy.") from None
