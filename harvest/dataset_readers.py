"""Records of one file, in order, as plain Python values in chunks of bounded size.

A reader never loses a record and never judges it: a line that cannot be read as a record becomes a `Bad` value in its
place. Only what makes the whole file unusable (damaged bytes, no such column, a column of the wrong type) is an error.

Memory: a chunk is about `BLOCK_BYTES`, and at most `TABLE_ROWS` rows of a table, or one record that is longer; Parquet
also holds the wanted columns of one row group.
"""

from __future__ import annotations

import difflib
import json
import lzma
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from harvest.dataset_checks import MISSING, Bad, Kind, explain_undecodable
from harvest.dataset_files import DataFile
from harvest.errors import DatasetError

BLOCK_BYTES = 1 << 19
TABLE_ROWS = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """What to take from a record."""

    kind: Kind
    source: str
    """Column of the text, token ids or messages."""
    id: str | None

    @property
    def names(self) -> tuple[str, ...]:
        """The columns to read."""
        return (self.source,) if self.id in (None, self.source) else (self.source, str(self.id))


@dataclass(frozen=True, kw_only=True, slots=True)
class RawChunk:
    """Consecutive records of one file."""

    values: list[Any]
    keys: list[Any] | None
    """The users' ids; None without an id column."""
    places: Sequence[int]
    """Line or row number of each record in its file, from 1."""
    place_word: Literal["line", "row"]
    file: DataFile


def read_file(file: DataFile, columns: Columns) -> Iterator[RawChunk]:
    """Chunks of a file's records.

    Raises:
        DatasetError: the file is damaged or lacks a column.
    """
    try:
        match file.format:
            case "text":
                yield from _read_text(file)
            case "jsonl":
                yield from _read_jsonl(file, columns)
            case "parquet":
                yield from _read_table(file, columns, _parquet_batches(file, columns))
            case "arrow":
                yield from _read_table(file, columns, _arrow_batches(file))
    except (OSError, EOFError, lzma.LZMAError, pa.ArrowException) as error:
        raise file.damaged(error) from error


def check_schema(file: DataFile, columns: Columns) -> None:
    """See that a table file has the columns, in usable types; reads its footer or first message only.

    Raises:
        DatasetError: damaged file, missing column, or a type that is not text, token ids, messages or ids.
    """
    if file.format not in ("parquet", "arrow"):
        return
    try:
        if file.format == "parquet":
            with pq.ParquetFile(file.path) as parquet:
                schema = parquet.schema_arrow
        else:
            schema = next(_arrow_batches(file, schema_only=True))
    except (OSError, EOFError, lzma.LZMAError, pa.ArrowException) as error:
        raise file.damaged(error) from error
    for name in columns.names:
        if name not in schema.names:
            raise _no_column(file, columns, name, schema.names)
        if schema.names.count(name) > 1:
            raise DatasetError(f'{file.path} has the column "{name}" {schema.names.count(name)} times')
    _check_type(file, columns.source, schema.field(columns.source).type, columns.kind)
    if columns.id is not None:
        _check_type(file, columns.id, schema.field(columns.id).type, "id")


# -- lines -----------------------------------------------------------------------------------------------------------


def _line_blocks(file: DataFile) -> Iterator[list[bytes]]:
    """Lists of whole lines, without line ends and without a byte order mark."""
    pieces: list[bytes] = []
    is_first = True
    with file.open() as stream:
        while block := stream.read(BLOCK_BYTES):
            if is_first:
                is_first = False
                if block.startswith((b"\xff\xfe", b"\xfe\xff")):
                    raise DatasetError(f"{file.path} is UTF-16: convert it to UTF-8 (iconv -f UTF-16 -t UTF-8)")
                block = block.removeprefix(b"\xef\xbb\xbf")
            head, newline, rest = block.rpartition(b"\n")
            if newline:
                pieces.append(head)
                yield b"".join(pieces).split(b"\n")
                pieces = []
            if rest:
                pieces.append(rest)
    if pieces:
        yield [b"".join(pieces)]


def _read_text(file: DataFile) -> Iterator[RawChunk]:
    first = 1
    for lines in _line_blocks(file):
        values = [line.removesuffix(b"\r") for line in lines]
        yield RawChunk(values=values, keys=None, places=range(first, first + len(lines)), place_word="line", file=file)
        first += len(lines)


def _read_jsonl(file: DataFile, columns: Columns) -> Iterator[RawChunk]:
    decode = _record_decoder(columns)
    first = 1
    n_records = 0
    has_column = False
    for lines in _line_blocks(file):
        places = [first + index for index, line in enumerate(lines) if line.strip()]
        first += len(lines)
        records = [decode(line) for line in lines if line.strip()]
        has_column = has_column or any(source is not MISSING and not isinstance(source, Bad) for source, _ in records)
        was_start = not n_records
        n_records += len(records)
        if was_start and len(records) > 1 and not has_column:
            raise _unusable_jsonl(file, columns, lines)
        if columns.id and records and was_start and all(key is MISSING for _, key in records):
            raise _no_column(file, columns, columns.id, _names_in(lines))
        if records:
            yield RawChunk(
                values=[source for source, _ in records],
                keys=[key for _, key in records] if columns.id else None,
                places=places,
                place_word="line",
                file=file,
            )


def _record_decoder(columns: Columns) -> Any:
    fields = [(f"field_{index}", Any, MISSING) for index in range(len(columns.names))]
    record = msgspec.defstruct(
        "Record", fields, rename={f"field_{index}": name for index, name in enumerate(columns.names)}
    )
    decode_known = msgspec.json.Decoder(record).decode
    has_id = columns.id is not None

    def decode(line: bytes) -> tuple[Any, Any]:
        try:
            found: Any = decode_known(line)
        except (msgspec.DecodeError, RecursionError):
            return _decode_slowly(line, columns)
        return found.field_0, (getattr(found, "field_1", found.field_0) if has_id else None)

    return decode


def _decode_slowly(line: bytes, columns: Columns) -> tuple[Any, Any]:
    """What the fast decoder refuses: NaN, lone surrogates, or a line that is really broken."""
    try:
        content = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Bad(reason="undecodable", detail=explain_undecodable(error)), MISSING
    except (ValueError, RecursionError) as error:
        return Bad(reason="not_json", detail=str(error)), MISSING
    if not isinstance(content, dict):
        detail = f"a record is a JSON object, not {type(content).__name__}"
        return Bad(reason="not_json", detail=detail), MISSING
    return content.get(columns.source, MISSING), (content.get(columns.id, MISSING) if columns.id else None)


def _names_in(lines: Iterable[bytes]) -> list[str]:
    names: dict[str, None] = {}
    for line in lines:
        try:
            content = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(content, dict):
            names.update(dict.fromkeys(content))
    return list(names)


def _unusable_jsonl(file: DataFile, columns: Columns, lines: list[bytes]) -> DatasetError:
    names = _names_in(lines)
    if names:
        return _no_column(file, columns, columns.source, names)
    first = next(line for line in lines if line.strip())
    detail = (
        "a JSON array; write one object a line"
        if first.lstrip().startswith(b"[")
        else repr(first[:60].decode(errors="replace"))
    )
    return DatasetError(
        f"{file.path} is no JSON lines file: none of its first {len(lines)} lines is a JSON object; it starts with "
        f"{detail}"
    )


# -- tables ----------------------------------------------------------------------------------------------------------


def _parquet_batches(file: DataFile, columns: Columns) -> Iterator[pa.RecordBatch]:
    with pq.ParquetFile(file.path, pre_buffer=False) as parquet:
        yield from parquet.iter_batches(batch_size=TABLE_ROWS, columns=list(columns.names))


def _arrow_batches(file: DataFile, schema_only: bool = False) -> Iterator[Any]:
    with file.open() if file.compression else pa.memory_map(str(file.path)) as source:
        head = b"" if file.compression else source.read(6)
        if not file.compression:
            source.seek(0)
        with pa.ipc.open_file(source) if head == b"ARROW1" else pa.ipc.open_stream(source) as reader:
            if schema_only:
                yield reader.schema
                return
            if head == b"ARROW1":
                batches: Iterable[pa.RecordBatch] = map(reader.get_batch, range(reader.num_record_batches))
            else:
                batches = reader
            yield from batches


def _read_table(file: DataFile, columns: Columns, batches: Iterable[pa.RecordBatch]) -> Iterator[RawChunk]:
    first = 1
    for batch in batches:
        for rows in _slices(batch.select(list(columns.names))):
            yield RawChunk(
                values=_python_values(rows.column(columns.source)),
                keys=_python_values(rows.column(columns.id)) if columns.id else None,
                places=range(first, first + rows.num_rows),
                place_word="row",
                file=file,
            )
            first += rows.num_rows


def _slices(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    n_bytes_per_row = batch.nbytes // max(batch.num_rows, 1) + 1
    n_rows = max(min(BLOCK_BYTES // n_bytes_per_row, TABLE_ROWS), 1)
    for start in range(0, batch.num_rows, n_rows):
        yield batch.slice(start, n_rows)


def _python_values(column: pa.Array) -> list[Any]:
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_string(column.type) or pa.types.is_large_string(column.type) or pa.types.is_string_view(column.type):
        try:
            column.validate(full=True)
        except pa.ArrowInvalid:
            # Not UTF-8 somewhere: hand out bytes, so that only the records that are affected are listed.
            return column.cast(pa.large_binary()).to_pylist()
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        return [_python_value(value) for value in column]


def _python_value(value: pa.Scalar) -> Any:
    try:
        return value.as_py()
    except UnicodeDecodeError as error:
        return Bad(reason="undecodable", detail=explain_undecodable(error))


def _check_type(file: DataFile, name: str, type: pa.DataType, kind: Kind | Literal["id"]) -> None:
    value = type.value_type if pa.types.is_dictionary(type) else type
    t = pa.types
    is_text = any(
        test(value)
        for test in (t.is_string, t.is_large_string, t.is_string_view, t.is_binary, t.is_large_binary, t.is_binary_view)
    )
    is_list = t.is_list(value) or t.is_large_list(value) or t.is_fixed_size_list(value)
    match kind:
        case "text":
            fits, wanted = is_text or t.is_null(value), "text"
        case "tokens":
            fits, wanted = is_list and t.is_integer(value.value_type), "lists of integers"
        case "messages":
            fits, wanted = is_text or (is_list and t.is_struct(value.value_type)), "lists of messages or JSON text"
        case "id":
            fits, wanted = is_text or t.is_integer(value), "text or integers"
    if not fits:
        raise DatasetError(f'column "{name}" of {file.path} is {type}, not {wanted}')


def _no_column(file: DataFile, columns: Columns, name: str, names: Sequence[str]) -> DatasetError:
    close = difflib.get_close_matches(name, names, n=2, cutoff=0.5)
    hint = f" (did you mean {' or '.join(close)}?)" if close else ""
    shown = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
    setting = "id_column" if name == columns.id else f"{columns.kind}_column"
    return DatasetError(f'{file.path} has no column "{name}"{hint}. Set dataset.{setting} to one of: {shown}')
