"""Columns, bad records, ids and fingerprints: each record comes out once, as a value or as a listed problem."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harvest import dataset_readers
from harvest.errors import DatasetError
from tests.harvest.written_datasets import (
    open_path,
    read_all,
    reasons,
    texts,
    write_arrow,
    write_lines,
    write_parquet,
)

# -- columns ---------------------------------------------------------------------------------------------------------


def test_missing_columns_suggest_close_names(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", {"texts": "a", "n": 1}, {"texts": "b", "n": 2})
    write_parquet(tmp_path / "a.parquet", texts=["a"], n=[1])
    for name in ("a.jsonl", "a.parquet"):
        with pytest.raises(
            DatasetError,
            match=r'no column "text" \(did you mean texts\?\)\. Set dataset.text_column to one of: texts, n',
        ):
            open_path(tmp_path / name)
        with pytest.raises(DatasetError, match='no column "ident"'):
            open_path(tmp_path / name, text_column="texts", id_column="ident")
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(DatasetError, match='plain text.* no column "ids"'):
        open_path(tmp_path / "a.txt", tokens_column="ids")


def test_table_columns_of_another_type(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", number=[1], text=["a"], floats=[[1.0]], ids=[[1]], real=[1.5])
    cases: list[tuple[dict[str, Any], str]] = [
        ({"text_column": "number"}, '"number" of .* is int64, not text'),
        ({"tokens_column": "floats"}, "not lists of integers"),
        ({"tokens_column": "text"}, "is string, not lists of integers"),
        ({"messages_column": "ids"}, "not lists of messages"),
        ({"id_column": "real"}, "is double, not text or integers"),
    ]
    for fields, words in cases:
        with pytest.raises(DatasetError, match=words):
            open_path(path, **fields)


def test_types_that_differ_between_files_name_the_file(tmp_path: Path) -> None:
    write_parquet(tmp_path / "1.parquet", text=["a"])
    write_parquet(tmp_path / "2.parquet", text=pa.array(["b"], pa.large_string()))
    assert texts(open_path(tmp_path)) == ["a", "b"]
    write_parquet(tmp_path / "3.parquet", text=[7])
    with pytest.raises(DatasetError, match=r"3\.parquet is int64, not text"):
        open_path(tmp_path)


# -- bad records -----------------------------------------------------------------------------------------------------


def test_bad_json_lines_are_listed_and_the_others_survive(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "a.jsonl",
        {"id": "a", "text": "good"},
        {"id": "b", "text": ""},
        {"id": "c", "text": None},
        {"id": "d"},
        {"id": "e", "text": 5},
        {"id": "f", "text": ["x"]},
        b'{"id": "g", "text": "bad \xff byte"}',
        b'{"id": "h", "text": "\\ud800 alone"}',
        b'{"id": "i", "text": "\\ud83d\\ude42 pair"}',
        b'{"id": "j", "text": "cut of',
        b'["k"]',
        b'{"id": "l", "text": "with", "score": NaN}',
        b"",
        b'{"id": null, "text": "no id"}',
        b'{"id": 1.5, "text": "odd id"}',
        b'{"text": "no id at all"}',
        {"id": 16, "text": "last"},
    )
    rows, problems = read_all(open_path(path, id_column="id"))
    assert [(row["invoke"], row["key"], row["text"]) for row in rows] == [
        (0, "a", "good"),
        (8, "i", "🙂 pair"),
        (11, "l", "with"),
        (15, "16", "last"),
    ]
    assert [(problem.invoke, problem.key, problem.reason) for problem in problems] == [
        (1, "b", "empty"),
        (2, "c", "null"),
        (3, "d", "null"),
        (4, "e", "not_text"),
        (5, "f", "not_text"),
        (6, None, "undecodable"),
        (7, "h", "undecodable"),
        (9, None, "not_json"),
        (10, None, "not_json"),
        (12, None, "bad_id"),
        (13, None, "bad_id"),
        (14, None, "bad_id"),
    ]
    details = {problem.invoke: problem.detail for problem in problems}
    assert details[4] == 'a.jsonl line 5: "text" is 5 (int), not text'
    assert details[6] == "a.jsonl line 7: byte 25 (0xff) is no valid UTF-8: invalid start byte"
    assert "lone surrogate U+D800" in details[7]
    assert details[12].startswith("a.jsonl line 14: id column"), "blank lines count as lines"


def test_undecodable_text_lines_and_table_cells(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"good\nbad \xc3\x28\nfine")
    broken = pa.array([b"good", b"bad \xc3\x28", b"fine"], pa.binary())
    as_string = pa.Array.from_buffers(pa.string(), 3, broken.buffers())
    write_parquet(tmp_path / "a.parquet", text=as_string)
    write_arrow(tmp_path / "a.arrow", pa.table({"text": broken}))
    for name in ("a.txt", "a.parquet", "a.arrow"):
        rows, problems = read_all(open_path(tmp_path / name))
        assert [row["text"] for row in rows] == ["good", "fine"]
        assert reasons(problems) == [(1, "undecodable")]
        assert "byte 4 (0xc3)" in problems[0].detail


def test_undecodable_messages_in_a_table(tmp_path: Path) -> None:
    raw = pa.array([b"good", b"bad \xc3\x28"], pa.binary())
    content = pa.Array.from_buffers(pa.string(), 2, raw.buffers())
    messages = pa.StructArray.from_arrays([pa.array(["user", "user"]), content], names=["role", "content"])
    write_parquet(tmp_path / "a.parquet", m=pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), messages))
    rows, problems = read_all(open_path(tmp_path / "a.parquet", messages_column="m"))
    assert [row["invoke"] for row in rows] == [0]
    assert reasons(problems) == [(1, "undecodable")]


def test_json_nested_beyond_measure_is_listed(tmp_path: Path) -> None:
    deep = b'{"text": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    elsewhere = b'{"text": "a", "other": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    rows, problems = read_all(open_path(write_lines(tmp_path / "a.jsonl", {"text": "a"}, deep, elsewhere)))
    assert [row["invoke"] for row in rows] == [0]
    assert reasons(problems) == [(1, "not_json"), (2, "not_json")]


def test_null_and_empty_cells(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", text=["a", None, "", "b"], id=["x", "y", "z", None])
    rows, problems = read_all(open_path(tmp_path / "a.parquet", id_column="id"))
    assert [row["invoke"] for row in rows] == [0]
    assert [(p.invoke, p.key, p.reason) for p in problems] == [(1, "y", "null"), (2, "z", "empty"), (3, None, "bad_id")]
    assert problems[0].detail == 'a.parquet row 2: "text" is null'
    write_parquet(tmp_path / "null.parquet", text=pa.nulls(2))
    assert reasons(read_all(open_path(tmp_path / "null.parquet"))[1]) == [(0, "null"), (1, "null")]


def test_not_json_lines_at_all(tmp_path: Path) -> None:
    (tmp_path / "prose.jsonl").write_text("not json\nreally not\n")
    with pytest.raises(DatasetError, match="no JSON lines file.*it starts with 'not json'"):
        open_path(tmp_path / "prose.jsonl")
    (tmp_path / "array.json").write_text('[{"text": "a"},\n{"text": "b"}]\n')
    with pytest.raises(DatasetError, match="a JSON array; write one object a line"):
        open_path(tmp_path / "array.json")


def test_token_columns(tmp_path: Path) -> None:
    good: list[Any] = [[1, 2, 3], [0]]
    for rows, problems in (
        read_all(open_path(write_lines(tmp_path / "a.jsonl", *[{"t": t} for t in good]), tokens_column="t")),
        read_all(open_path(write_parquet(tmp_path / "a.parquet", t=good), tokens_column="t")),
        read_all(
            open_path(write_parquet(tmp_path / "b.parquet", t=pa.array(good, pa.list_(pa.uint16()))), tokens_column="t")
        ),
    ):
        assert [row["tokens"] for row in rows] == good
        assert not problems
    bad: list[Any] = [[1], [], None, [1, 2.5], [True], ["1"], "1 2", [2**70], [-3]]
    rows, problems = read_all(open_path(write_lines(tmp_path / "c.jsonl", *[{"t": t} for t in bad]), tokens_column="t"))
    assert [row["invoke"] for row in rows] == [0, 8]
    assert reasons(problems) == [
        (1, "empty"),
        (2, "null"),
        *[(index, "bad_tokens") for index in range(3, 8)],
    ]
    _, problems = read_all(open_path(write_parquet(tmp_path / "d.parquet", t=[[1, None], [], None]), tokens_column="t"))
    assert reasons(problems) == [(0, "bad_tokens"), (1, "empty"), (2, "null")]


def test_message_columns(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None}]
    write_lines(tmp_path / "a.jsonl", {"m": chat}, {"m": json.dumps(chat)}, {"m": []}, {"m": 3}, {"m": None})
    rows, problems = read_all(open_path(tmp_path / "a.jsonl", messages_column="m"))
    assert [json.loads(row["messages"]) for row in rows] == [chat, chat]
    assert reasons(problems) == [(2, "empty"), (3, "bad_messages"), (4, "null")]
    write_parquet(tmp_path / "a.parquet", m=[chat])
    rows, _ = read_all(open_path(tmp_path / "a.parquet", messages_column="m"))
    assert json.loads(rows[0]["messages"]) == chat


# -- ids, limit, fingerprint -----------------------------------------------------------------------------------------


def test_duplicate_ids_are_refused_with_their_records(tmp_path: Path) -> None:
    records: list[Any] = [{"id": index, "text": "t"} for index in range(3000)]
    records[2999]["id"] = "7"
    records[2500]["id"] = 3
    dataset = open_path(write_lines(tmp_path / "a.jsonl", *records), id_column="id")
    with pytest.raises(DatasetError, match=r'these are not: "3" in records 3, 2500; "7" in records 7, 2999'):
        read_all(dataset)
    assert len(read_all(open_path(tmp_path / "a.jsonl", id_column="id", limit=2500))[0]) == 2500


def test_duplicate_ids_are_found_long_before_the_end(tmp_path: Path) -> None:
    records: list[Any] = [{"id": index % 2000, "text": "t"} for index in range(40_000)]
    dataset = open_path(write_lines(tmp_path / "a.jsonl", *records), id_column="id")
    n_read = 0
    with pytest.raises(DatasetError, match='these are not: "0" in records 0, 2000; "1" in'):
        for batch in dataset.records():
            n_read += batch.n_records
    assert n_read <= 4 * 1024


def test_limit_counts_bad_records_too_and_spans_files(tmp_path: Path) -> None:
    write_lines(tmp_path / "1.jsonl", {"text": "a"}, {"text": ""})
    write_lines(tmp_path / "2.jsonl", {"text": "b"}, {"text": "c"})
    rows, problems = read_all(open_path(tmp_path, limit=3))
    assert [row["text"] for row in rows] == ["a", "b"]
    assert reasons(problems) == [(1, "empty")]


def test_fingerprint_changes_with_whatever_changes_the_records(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
        write_lines(folder / "a.jsonl", {"text": "a", "id": 1, "other": "x"})
        write_lines(folder / "b.jsonl", {"text": "b", "id": 2, "other": "y"})
    base = open_path(one).fingerprint
    assert open_path(one).fingerprint == base
    assert open_path(two).fingerprint == base, "the folder's own place does not matter"
    others = {
        open_path(one, limit=1).fingerprint,
        open_path(one, id_column="id").fingerprint,
        open_path(one, text_column="other").fingerprint,
        open_path([one / "b.jsonl", one / "a.jsonl"]).fingerprint,
        open_path(one / "a.jsonl").fingerprint,
    }
    write_lines(two / "b.jsonl", {"text": "B", "id": 2, "other": "y"})
    others.add(open_path(two).fingerprint)
    (two / "b.jsonl").rename(two / "c.jsonl")
    others.add(open_path(two).fingerprint)
    assert len(others | {base}) == 8


# -- any lines, any block size ---------------------------------------------------------------------------------------

PLAIN = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n\r"), max_size=12)
GOOD = PLAIN.filter(bool).map(lambda text: (json.dumps({"text": text}).encode(), text))
RAW = PLAIN.filter(bool).map(lambda text: (json.dumps({"text": text}, ensure_ascii=False).encode(), text))
BROKEN = st.sampled_from(
    [b"{", b"3", b'{"text": 1}', b'{"text": ""}', b'{"text": "\xff"}', b'{"text": "\\udc00"}', b"\xff", b"{}"]
).map(lambda line: (line, None))
BLANK = st.sampled_from([b"", b"  ", b"\t"]).map(lambda line: (line, False))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    lines=st.lists(st.one_of(GOOD, RAW, BROKEN, BLANK), max_size=20),
    end=st.sampled_from([b"\n", b"\r\n"]),
    block_bytes=st.integers(1, 40),
    ends_with_newline=st.booleans(),
    bom=st.sampled_from([b"", b"\xef\xbb\xbf"]),
)
def test_json_lines_in_any_blocks(
    tmp_path_factory: pytest.TempPathFactory,
    lines: list[tuple[bytes, str | bool | None]],
    end: bytes,
    block_bytes: int,
    ends_with_newline: bool,
    bom: bytes,
) -> None:
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    first: tuple[bytes, str | bool | None] = (b'{"text": "first"}', "first")
    path.write_bytes(bom + end.join(line for line, _ in [first, *lines]) + (end if ends_with_newline else b""))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dataset_readers, "BLOCK_BYTES", block_bytes + len(bom))
        rows, problems = read_all(open_path(path))
    records = [text for _, text in [first, *lines] if text is not False]
    assert [(row["invoke"], row["text"]) for row in rows] == [(i, t) for i, t in enumerate(records) if t is not None]
    assert [problem.invoke for problem in problems] == [i for i, t in enumerate(records) if t is None]


@settings(deadline=None)
@given(prompts=st.lists(PLAIN, min_size=1, max_size=20), block_bytes=st.integers(1, 30), last=st.booleans())
def test_plain_text_in_any_blocks(
    tmp_path_factory: pytest.TempPathFactory, prompts: list[str], block_bytes: int, last: bool
) -> None:
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_bytes(b"\xef\xbb\xbf" + "\n".join(["first", *prompts]).encode() + (b"\n" if last else b"end"))
    expected = ["first", *prompts]
    if not last:
        expected[-1] += "end"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dataset_readers, "BLOCK_BYTES", block_bytes + 3)
        rows, problems = read_all(open_path(path))
    assert [(row["invoke"], row["text"]) for row in rows] == [(i, t) for i, t in enumerate(expected) if t]
    assert reasons(problems) == [(i, "empty") for i, t in enumerate(expected) if not t]


def test_a_very_long_line(tmp_path: Path) -> None:
    long = "x" * (5 * dataset_readers.BLOCK_BYTES)
    rows, _ = read_all(open_path(write_lines(tmp_path / "a.jsonl", {"text": "a"}, {"text": long}, {"text": "b"})))
    assert [len(row["text"]) for row in rows] == [1, len(long), 1]


def test_batches_of_tables_are_bounded_in_bytes(tmp_path: Path) -> None:
    text = "x" * 10_000
    path = write_parquet(tmp_path / "a.parquet", text=[text] * 500, other=[text] * 500)
    batches = list(open_path(path).records())
    assert sum(batch.n_records for batch in batches) == 500
    assert max(batch.table.nbytes for batch in batches) < 2 * dataset_readers.BLOCK_BYTES
