"""Every format and compression, whole and damaged, and what paths lead to."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import re
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harvest import dataset_readers
from harvest.config import DatasetConfig
from harvest.dataset import open_dataset
from harvest.errors import DatasetError
from tests.harvest.written_datasets import (
    TEXTS,
    open_path,
    read_all,
    texts,
    write_arrow,
    write_lines,
    write_parquet,
    write_saved_dataset,
)

# -- formats ---------------------------------------------------------------------------------------------------------


def test_parquet_over_several_row_groups(tmp_path: Path) -> None:
    table = pa.table({"other": [1.0] * 5, "text": TEXTS, "id": [10, 20, 30, 40, 50]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    rows, _ = read_all(open_path(tmp_path / "a.parquet", id_column="id"))
    assert [(row["invoke"], row["key"], row["text"]) for row in rows] == [
        (index, str(10 * index + 10), text) for index, text in enumerate(TEXTS)
    ]


@pytest.mark.parametrize("type", [pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary()])
def test_text_types_of_tables(tmp_path: Path, type: pa.DataType) -> None:
    column = pa.array([text.encode() for text in TEXTS]).cast(pa.string()).cast(type)
    assert texts(open_path(write_arrow(tmp_path / "a.arrow", pa.table({"text": column})))) == TEXTS


def test_dictionary_encoded_text(tmp_path: Path) -> None:
    column = pa.array(TEXTS * 2).dictionary_encode()
    assert texts(open_path(write_arrow(tmp_path / "a.arrow", pa.table({"text": column})))) == TEXTS * 2
    assert texts(open_path(write_parquet(tmp_path / "a.parquet", text=column))) == TEXTS * 2


def test_arrow_files_and_streams(tmp_path: Path) -> None:
    table = pa.table({"text": TEXTS})
    assert texts(open_path(write_arrow(tmp_path / "stream.arrow", table))) == TEXTS
    assert texts(open_path(write_arrow(tmp_path / "file.arrow", table, as_file=True))) == TEXTS
    (tmp_path / "c.arrow.gz").write_bytes(gzip.compress((tmp_path / "stream.arrow").read_bytes()))
    assert texts(open_path(tmp_path / "c.arrow.gz")) == TEXTS


def test_saved_hugging_face_dataset_in_the_order_of_its_state(tmp_path: Path) -> None:
    folder = write_saved_dataset(tmp_path / "d", pa.table({"text": TEXTS[:3]}), pa.table({"text": TEXTS[3:]}))
    write_arrow(folder / "cache-0123.arrow", pa.table({"text": ["left over by a map"]}))
    assert texts(open_path(folder)) == TEXTS


def test_saved_hugging_face_splits_are_listed(tmp_path: Path) -> None:
    write_saved_dataset(tmp_path / "d" / "train", pa.table({"text": TEXTS}))
    (tmp_path / "d" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(DatasetError, match=r'splits train, test: set dataset.path to ".*d/train" or ".*d/test"'):
        open_path(tmp_path / "d")
    assert texts(open_path(tmp_path / "d" / "train")) == TEXTS


def test_saved_hugging_face_dataset_that_is_incomplete(tmp_path: Path) -> None:
    folder = write_saved_dataset(tmp_path / "d", pa.table({"text": TEXTS}), pa.table({"text": TEXTS}))
    (folder / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(DatasetError, match="incomplete: data-00001-of-00002.arrow of 2"):
        open_path(folder)


def test_plain_text_lines(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\n\nfour\r\n  \nlast")
    rows, problems = read_all(open_path(tmp_path / "a.txt"))
    assert [(row["invoke"], row["text"]) for row in rows] == [
        (0, "one"),
        (1, "two"),
        (3, "four"),
        (4, "  "),
        (5, "last"),
    ]
    assert [str(problem) for problem in problems] == ["record 2: empty, a.txt line 3: the text is empty"]


COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": lambda data: pa.compress(data, codec="zstd", asbytes=True),
    "lz4": lambda data: pa.compress(data, codec="lz4", asbytes=True),
}


@pytest.mark.parametrize("suffix", COMPRESSIONS)
def test_compressed_lines(tmp_path: Path, suffix: str) -> None:
    lines = "".join(json.dumps({"text": f"prompt {index}"}) + "\n" for index in range(5000)).encode()
    compress = COMPRESSIONS[suffix]
    packed = compress(lines)
    expected = [f"prompt {index}" for index in range(5000)]
    (tmp_path / f"a.jsonl.{suffix}").write_bytes(packed)
    assert texts(open_path(tmp_path / f"a.jsonl.{suffix}")) == expected
    (tmp_path / f"twice.jsonl.{suffix}").write_bytes(packed + packed)
    assert texts(open_path(tmp_path / f"twice.jsonl.{suffix}")) == expected * 2
    (tmp_path / "unmarked.jsonl").write_bytes(packed)
    assert texts(open_path(tmp_path / "unmarked.jsonl")) == expected


@pytest.mark.parametrize("suffix", COMPRESSIONS)
@pytest.mark.parametrize("damage", ["cut", "flipped", "not compressed", "trailing"])
def test_broken_compressed_files_are_named(tmp_path: Path, suffix: str, damage: str) -> None:
    lines = "".join(json.dumps({"text": f"prompt {index * 7919 % 5003}"}) + "\n" for index in range(5000)).encode()
    packed = bytearray(COMPRESSIONS[suffix](lines))
    if damage == "cut":
        packed = packed[: len(packed) // 2]
    elif damage == "flipped":
        for index in range(len(packed) // 2, len(packed) // 2 + 8):
            packed[index] ^= 0xA5
    elif damage == "trailing":
        packed += b"something else"
    else:
        packed = bytearray(lines)
    path = tmp_path / f"a.jsonl.{suffix}"
    path.write_bytes(packed)
    with pytest.raises(DatasetError, match=r"a\.jsonl\.\w+ is damaged or is no \w+-compressed jsonl file"):
        read_all(open_path(path))


# -- where files are -------------------------------------------------------------------------------------------------


def test_folders_patterns_and_lists(tmp_path: Path) -> None:
    data = tmp_path / "data"
    (data / "deep").mkdir(parents=True)
    write_lines(data / "b.jsonl", {"text": "b"})
    write_lines(data / "deep" / "a.jsonl", {"text": "deep a"})
    write_lines(data / "c.jsonl.part", {"text": "unfinished"})
    (data / "README.md").write_text("about")
    (data / "dataset_infos.json").write_text("{}")
    (data / "_SUCCESS").write_text("")
    (data / ".cache").mkdir()
    write_lines(data / ".cache" / "x.jsonl", {"text": "hidden"})
    assert texts(open_path(data)) == ["b", "deep a"]
    assert texts(open_path(data / "*.jsonl")) == ["b"]
    assert texts(open_path(data / "**" / "*.jsonl")) == ["b", "deep a"]
    assert texts(open_path([data / "deep", data / "b.jsonl"])) == ["deep a", "b"]
    assert [file.name for file in open_path(data).files] == ["b.jsonl", "deep/a.jsonl"]


def test_relative_paths_start_from_the_base(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", {"text": "a"})
    assert texts(open_dataset(DatasetConfig(path="a.jsonl"), tmp_path)) == ["a"]
    assert texts(open_dataset(DatasetConfig(path="*.jsonl"), tmp_path)) == ["a"]


def test_a_file_whose_name_looks_like_a_pattern(tmp_path: Path) -> None:
    write_lines(tmp_path / "a[1].jsonl", {"text": "a"})
    assert texts(open_path(tmp_path / "a[1].jsonl")) == ["a"]


def test_what_cannot_be_found_or_told(tmp_path: Path) -> None:
    write_lines(tmp_path / "train.jsonl", {"text": "a"})
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "odd.dat").write_text("text")
    write_parquet(tmp_path / "b.parquet", text=["b"])
    (tmp_path / "b.parquet.gz").write_bytes(gzip.compress((tmp_path / "b.parquet").read_bytes()))
    (tmp_path / "wide.txt").write_bytes("text".encode("utf-16"))
    cases: list[tuple[list[Path], str]] = [
        ([tmp_path / "trian.jsonl"], r"no file or folder .*trian.jsonl; did you mean train.jsonl"),
        ([tmp_path / "nowhere" / "a.jsonl"], "nor a folder .*nowhere"),
        ([tmp_path / "*.arrow"], "no file matches"),
        ([tmp_path / "empty.jsonl"], r"empty.jsonl is empty \(0 bytes\)"),
        ([tmp_path / "folder"], "folder has no data file"),
        ([tmp_path / "odd.dat"], "does not tell its format.*set dataset.format"),
        ([tmp_path / "train.jsonl", tmp_path / "b.parquet"], "mixes formats: train.jsonl .*b.parquet"),
        ([tmp_path / "train.jsonl", tmp_path / "tr*.jsonl"], "in the dataset twice"),
        ([tmp_path / "b.parquet.gz"], "compressed parquet file.*decompress it"),
        ([tmp_path / "wide.txt"], "UTF-16"),
        ([], "empty list"),
    ]
    for paths, words in cases:
        with pytest.raises(DatasetError, match=words):
            open_path(paths)
    with pytest.raises(DatasetError, match="URL"):
        open_dataset(DatasetConfig(path="hf://datasets/x/y"))
    assert texts(open_path(tmp_path / "odd.dat", format="text")) == ["text"]


def test_no_records_at_all(tmp_path: Path) -> None:
    (tmp_path / "blank.jsonl").write_bytes(b"\n\n  \n")
    write_parquet(tmp_path / "none.parquet", text=pa.array([], pa.string()))
    write_arrow(tmp_path / "none.arrow", pa.table({"text": pa.array([], pa.string())}))
    (tmp_path / "none.txt.gz").write_bytes(gzip.compress(b""))
    for name in ("blank.jsonl", "none.parquet", "none.arrow", "none.txt.gz"):
        with pytest.raises(DatasetError, match=f"no records: .*{re.escape(name)}"):
            open_path(tmp_path / name)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_broken_tables_are_named(tmp_path: Path, name: str) -> None:
    table = pa.table({"text": [f"prompt {index * 7919 % 5003}" for index in range(5000)]})
    path = tmp_path / name
    if name.endswith("parquet"):
        pq.write_table(table, path, compression="gzip")
    else:
        write_arrow(path, table)
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[2000:2100] = bytes(100)
    damages = {"cut": whole[: len(whole) // 2], "other": b"this is no table" * 100}
    if name.endswith("parquet"):
        damages["flipped"] = bytes(flipped)
    for damaged in damages.values():
        path.write_bytes(damaged)
        with pytest.raises(DatasetError, match=f"{re.escape(name)} is damaged or is no"):
            read_all(open_path(path))


CELL = st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


@settings(deadline=None)
@given(
    cells=st.lists(CELL, min_size=1, max_size=30),
    type=st.sampled_from([pa.string(), pa.large_string(), pa.binary(), pa.dictionary(pa.int32(), pa.string())]),
    group=st.integers(1, 10),
    as_parquet=st.booleans(),
    table_rows=st.integers(1, 8),
)
def test_tables_in_any_groups(
    tmp_path_factory: pytest.TempPathFactory,
    cells: list[str | None],
    type: pa.DataType,
    group: int,
    as_parquet: bool,
    table_rows: int,
) -> None:
    folder = tmp_path_factory.mktemp("table")
    text = pa.array(cells, pa.string())
    text = text.dictionary_encode() if pa.types.is_dictionary(type) else text.cast(type)
    table = pa.table({"id": range(100, 100 + len(cells)), "text": text})
    if as_parquet:
        pq.write_table(table, folder / "a.parquet", row_group_size=group)
    else:
        write_arrow(folder / "a.arrow", table)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dataset_readers, "TABLE_ROWS", table_rows)
        rows, problems = read_all(open_path(folder, id_column="id"))
    expected = [(index, str(100 + index), cell) for index, cell in enumerate(cells)]
    assert [(row["invoke"], row["key"], row["text"]) for row in rows] == [each for each in expected if each[2]]
    assert [(p.invoke, p.key, p.reason) for p in problems] == [
        (index, key, "null" if cell is None else "empty") for index, key, cell in expected if not cell
    ]
