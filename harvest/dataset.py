"""A dataset as numbered records, and what is wrong with those that cannot be used.

Invariants:

- A record's number is its place in the dataset, from 0: files in order, records in order. Bad records are numbered too,
  blank lines of JSON lines are not records, every line of plain text is one. The number is the invoke's id.
- Every record comes out exactly once: in a batch's table or as one of its problems.
- A record in a table has text that encodes to UTF-8 and is not empty, a list of integers that is not empty, or messages
  as JSON text; and a key if the dataset has ids.
- Memory does not grow with the dataset, but for 8 bytes a record that find duplicate ids.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from harvest.config import DatasetConfig
from harvest.dataset_checks import CHECKS, Bad, Kind, Reason, check_key
from harvest.dataset_files import DataFile, find_files, fingerprint
from harvest.dataset_readers import Columns, RawChunk, check_schema, read_file
from harvest.errors import DatasetError

BATCH_RECORDS = 1024
_SHOWN = 5

VALUE_TYPES: dict[Kind, pa.DataType] = {
    "text": pa.large_string(),
    "tokens": pa.large_list(pa.int64()),
    "messages": pa.large_string(),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """A record that gets no rows, and why."""

    invoke: int
    key: str | None
    """The user's id, where there is one."""
    reason: Reason
    detail: str
    """One line: the place in the file, and what is wrong there."""

    def __str__(self) -> str:
        key = f' (id "{self.key}")' if self.key is not None else ""
        return f"record {self.invoke}{key}: {self.reason}, {self.detail}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordBatch:
    """Consecutive records."""

    table: pa.RecordBatch
    """The usable ones: `invoke` int64, `key` string or null, and one of `text` (string), `tokens` (list of int64),
    `messages` (JSON text)."""
    problems: tuple[Problem, ...]
    n_records: int
    """Usable and bad together."""


class Dataset:
    """Records of one or several files. Made by `open_dataset`."""

    def __init__(self, config: DatasetConfig, files: tuple[DataFile, ...]) -> None:
        self.config = config
        self.files = files
        self.columns = _columns(config, files[0])

    @property
    def kind(self) -> Kind:
        """What the records hold: text, token ids or messages."""
        return self.columns.kind

    @cached_property
    def fingerprint(self) -> str:
        """Hash (hex) of file names, file bytes, and the settings that decide which records there are.

        Reads every byte once, at the speed of the disk. It does not depend on the folder the files are in.
        """
        settings = {
            "kind": self.kind,
            "source": self.columns.source,
            "id": self.columns.id,
            "limit": self.config.limit,
            "format": self.files[0].format,
        }
        return fingerprint(self.files, settings)

    def records(self) -> Iterator[RecordBatch]:
        """All records in order, in batches of at most `BATCH_RECORDS`.

        Raises:
            DatasetError: a damaged file, no record at all, or an id that two records share (found at the latest when
                twice as many records are read).
        """
        first = 0
        hashes = _KeyHashes()
        for chunk in self._chunks():
            batch, keys = self._batch(chunk, first)
            hashes.add(keys)
            first += batch.n_records
            if hashes.has_doubled():
                self._refuse_duplicates(hashes.repeated(), first)
            yield batch
        if not first:
            raise _no_records(self.files)
        self._refuse_duplicates(hashes.repeated(), first)

    def _chunks(self) -> Iterator[RawChunk]:
        left = self.config.limit
        for file in self.files:
            for chunk in read_file(file, self.columns):
                for start in range(0, len(chunk.values), BATCH_RECORDS):
                    n = min(BATCH_RECORDS, len(chunk.values) - start, BATCH_RECORDS if left is None else left)
                    yield RawChunk(
                        values=chunk.values[start : start + n],
                        keys=chunk.keys[start : start + n] if chunk.keys is not None else None,
                        places=chunk.places[start : start + n],
                        place_word=chunk.place_word,
                        file=chunk.file,
                    )
                    if left is not None:
                        left -= n
                        if not left:
                            return

    def _batch(self, chunk: RawChunk, first: int) -> tuple[RecordBatch, list[str]]:
        check = CHECKS[self.kind]
        invokes: list[int] = []
        keys: list[str | None] = []
        values: list[Any] = []
        problems: list[Problem] = []
        all_keys: list[str] = []
        for index, raw in enumerate(chunk.values):
            value = check(raw, self.columns.source)
            key: str | Bad | None = None
            if chunk.keys is not None:
                key = check_key(chunk.keys[index], self.columns.id)
                if isinstance(key, str):
                    all_keys.append(key)
                elif not isinstance(value, Bad):
                    value = key
            if isinstance(value, Bad):
                place = f"{chunk.file.name} {chunk.place_word} {chunk.places[index]}"
                problems.append(
                    Problem(
                        invoke=first + index,
                        key=key if isinstance(key, str) else None,
                        reason=value.reason,
                        detail=f"{place}: {value.detail}",
                    )
                )
                continue
            invokes.append(first + index)
            keys.append(key if isinstance(key, str) else None)
            values.append(value)
        table = pa.record_batch(
            [
                pa.array(invokes, pa.int64()),
                pa.array(keys, pa.string()),
                pa.array(values, VALUE_TYPES[self.kind]),
            ],
            names=["invoke", "key", self.kind],
        )
        return RecordBatch(table=table, problems=tuple(problems), n_records=len(chunk.values)), all_keys

    def _refuse_duplicates(self, suspects: set[int], n_records: int) -> None:
        """A second pass over the first `n_records`, to tell real duplicates from equal hashes."""
        if not suspects:
            return
        rows: dict[str, list[int]] = {}
        first = 0
        for chunk in self._chunks():
            for index, raw in enumerate(chunk.keys or ()):
                key = check_key(raw, self.columns.id)
                if isinstance(key, str) and _hash(key) in suspects:
                    rows.setdefault(key, []).append(first + index)
            first += len(chunk.values)
            if first >= n_records:
                break
        repeated = {key: found for key, found in rows.items() if len(found) > 1}
        if not repeated:
            return
        shown = "; ".join(
            f'"{key}" in records {", ".join(map(str, found[:_SHOWN]))}{", ..." if len(found) > _SHOWN else ""}'
            for key, found in list(repeated.items())[:_SHOWN]
        )
        raise DatasetError(
            f'ids in column "{self.columns.id}" must be unique; these are not: {shown}. Make them unique, or '
            "leave dataset.id_column out (records are numbered anyway)"
        )


def open_dataset(config: DatasetConfig, base: Path | None = None) -> Dataset:
    """Find the dataset's files and see that they are what the configuration says; reads little of them.

    Args:
        config: paths, format and columns.
        base: folder that relative paths start from; default: the working directory.

    Raises:
        DatasetError: missing path, nothing matches, empty file, unknown or mixed formats, damaged file, missing column
            or a column of another type, no record at all.
    """
    paths = (config.path,) if isinstance(config.path, str) else config.path
    if not paths:
        raise DatasetError("dataset.path is an empty list")
    dataset = Dataset(config, find_files(paths, config.format, base or Path.cwd()))
    for file in dataset.files:
        check_schema(file, dataset.columns)
    if next(dataset._chunks(), None) is None:
        raise _no_records(dataset.files)
    return dataset


def _no_records(files: tuple[DataFile, ...]) -> DatasetError:
    return DatasetError(f"the dataset has no records: {', '.join(str(file.path) for file in files[:_SHOWN])}")


def _columns(config: DatasetConfig, file: DataFile) -> Columns:
    if config.tokens_column:
        columns = Columns(kind="tokens", source=config.tokens_column, id=config.id_column)
    elif config.messages_column:
        columns = Columns(kind="messages", source=config.messages_column, id=config.id_column)
    else:
        columns = Columns(kind="text", source=config.text_column, id=config.id_column)
    if file.format == "text" and (columns.kind != "text" or columns.id is not None):
        name = config.tokens_column or config.messages_column or config.id_column
        raise DatasetError(
            f'{file.path} is plain text, one prompt a line, and has no column "{name}": leave the column out, or use '
            "JSON lines"
        )
    return columns


# -- duplicate ids ---------------------------------------------------------------------------------------------------


def _hash(key: str) -> int:
    return xxhash.xxh3_64_intdigest(key.encode())


class _KeyHashes:
    """64-bit hashes of all keys: 8 bytes a record."""

    def __init__(self) -> None:
        self._parts: list[np.ndarray[Any, np.dtype[np.uint64]]] = []
        self._n = 0
        self._n_checked = BATCH_RECORDS

    def add(self, keys: list[str]) -> None:
        if keys:
            self._parts.append(np.fromiter(map(_hash, keys), np.uint64, len(keys)))
            self._n += len(keys)

    def has_doubled(self) -> bool:
        """There are twice as many as when this was last true: time to look, so that all looks together cost little."""
        if self._n < 2 * self._n_checked:
            return False
        self._n_checked = self._n
        return True

    def repeated(self) -> set[int]:
        """Hashes that occur more than once."""
        if not self._parts:
            return set()
        hashes = np.concatenate(self._parts)
        hashes.sort()
        return set(hashes[1:][hashes[1:] == hashes[:-1]].tolist())
