"""Datasets on disk for tests, in every format, and readers that check that each record comes out once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from harvest.config import DatasetConfig
from harvest.dataset import Dataset, Problem, open_dataset

TEXTS = ["first prompt", "zweite Anfrage: größer", "三つ目 🙂", "fourth\nwith a line end", " "]


def open_path(path: Path | list[Path], **fields: Any) -> Dataset:
    paths = str(path) if isinstance(path, Path) else tuple(map(str, path))
    return open_dataset(DatasetConfig(path=paths, **fields))


def read_all(dataset: Dataset) -> tuple[list[dict[str, Any]], list[Problem]]:
    batches = list(dataset.records())
    rows = [row for batch in batches for row in batch.table.to_pylist()]
    problems = [problem for batch in batches for problem in batch.problems]
    n_records = sum(batch.n_records for batch in batches)
    numbers = sorted([row["invoke"] for row in rows] + [problem.invoke for problem in problems])
    assert numbers == list(range(n_records)), "every record comes out once"
    return rows, problems


def texts(dataset: Dataset) -> list[str]:
    rows, problems = read_all(dataset)
    assert not problems
    return [row["text"] for row in rows]


def reasons(problems: list[Problem]) -> list[tuple[int, str]]:
    return [(problem.invoke, problem.reason) for problem in problems]


def write_lines(path: Path, *records: Any) -> Path:
    path.write_bytes(b"".join((r if isinstance(r, bytes) else json.dumps(r).encode()) + b"\n" for r in records))
    return path


def write_parquet(path: Path, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def write_arrow(path: Path, table: pa.Table, *, as_file: bool = False) -> Path:
    make = pa.ipc.new_file if as_file else pa.ipc.new_stream
    with make(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return path


def write_saved_dataset(folder: Path, *tables: pa.Table) -> Path:
    folder.mkdir(parents=True)
    names = [f"data-{index:05d}-of-{len(tables):05d}.arrow" for index in range(len(tables))]
    for name, table in zip(names, tables, strict=True):
        write_arrow(folder / name, table)
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "0", "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return folder
