"""Datasets to invokes: lengths, ids, policies, and the same result from any number of processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, normalizers
from tokenizers import Tokenizer as FastTokenizer

from harvest import tokenization
from harvest.config import TokenizationConfig
from harvest.dataset import Problem, RecordBatch
from harvest.encoding import INVOKES_SCHEMA, Encoder, EncoderSettings, TokenizedBatch, part_of, record_of
from harvest.errors import ConfigError, DatasetError, RunError
from harvest.tokenization import Tokenization, tokenize
from harvest.tokenization_worker import WorkerProcess
from harvest.tokenizer import TokenizerSource
from tests.harvest.written_datasets import open_path, write_lines
from tests.tiny_models import train_tokenizer

BOS = 0


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> TokenizerSource:
    return TokenizerSource(name=str(train_tokenizer(tmp_path_factory.mktemp("tokenizer"))))


def invokes_of(
    path: Path,
    source: TokenizerSource,
    *,
    max_length: int = 100,
    max_tokens: int = 1,
    n_vocabulary: int | None = None,
    dataset: dict[str, Any] | None = None,
    **config: Any,
) -> tuple[list[dict[str, Any]], list[Problem]]:
    tokens = tokenize(
        open_path(path, **(dataset or {})),
        source,
        TokenizationConfig(**{"processes": 1, **config}),
        max_length=max_length,
        max_tokens=max_tokens,
        n_vocabulary=n_vocabulary,
    )
    batches = list(tokens)
    for batch in batches:
        assert batch.invokes.schema == INVOKES_SCHEMA
    rows = [row for batch in batches for row in batch.invokes.to_pylist()]
    assert all(row["n_prompt_tokens"] == len(row["token_ids"]) for row in rows)
    return rows, [problem for batch in batches for problem in batch.skipped]


def write_tokens(path: Path, *prompts: list[int]) -> Path:
    return write_lines(path, *({"t": prompt, "id": f"p{index}"} for index, prompt in enumerate(prompts)))


TOKENS = {"tokens_column": "t", "id_column": "id"}


def test_texts_become_invokes_with_their_record_number_and_key(tmp_path: Path, source: TokenizerSource) -> None:
    records: list[dict[str, Any]] = [{"text": "a b", "id": 7}, {"text": "", "id": 8}, {"text": "c", "id": 9}]
    path = write_lines(tmp_path / "a.jsonl", *records)
    rows, skipped = invokes_of(path, source, dataset={"id_column": "id"})
    assert [(row["invoke"], row["key"], row["truncated"]) for row in rows] == [(0, "7", False), (2, "9", False)]
    assert all(row["token_ids"][0] == BOS for row in rows)
    assert [(problem.invoke, problem.key, problem.reason) for problem in skipped] == [(1, "8", "empty")]
    rows, _ = invokes_of(path, source, add_special_tokens=False)
    assert all(row["token_ids"][0] != BOS for row in rows)


def test_a_prompt_may_fill_the_model_but_for_what_is_generated(tmp_path: Path, source: TokenizerSource) -> None:
    path = write_tokens(tmp_path / "a.jsonl", list(range(9)))
    for max_length, max_tokens in ((10, 1), (12, 3)):
        rows, _ = invokes_of(path, source, max_length=max_length, max_tokens=max_tokens, dataset=TOKENS)
        assert rows[0]["n_prompt_tokens"] == 9
        with pytest.raises(DatasetError, match=r'record 0 \(id "p0"\): overlong, 9 tokens; at most 8 fit.*truncate'):
            invokes_of(path, source, max_length=max_length - 1, max_tokens=max_tokens, dataset=TOKENS)
    with pytest.raises(ConfigError, match="no room for a prompt"):
        invokes_of(path, source, max_length=5, max_tokens=5, dataset=TOKENS)


def test_overlong_prompts_are_cut_split_or_listed(tmp_path: Path, source: TokenizerSource) -> None:
    path = write_tokens(tmp_path / "a.jsonl", [1, 2], list(range(10, 19)), [3])
    fields: dict[str, Any] = {"max_length": 5, "dataset": TOKENS}
    rows, skipped = invokes_of(path, source, overlong="skip", **fields)
    assert [row["invoke"] for row in rows] == [0, 2]
    assert [(problem.invoke, problem.key, problem.reason) for problem in skipped] == [(1, "p1", "overlong")]
    rows, skipped = invokes_of(path, source, overlong="truncate", **fields)
    assert [(row["token_ids"], row["truncated"]) for row in rows] == [
        ([1, 2], False),
        ([10, 11, 12, 13], True),
        ([3], False),
    ]
    assert not skipped
    rows, skipped = invokes_of(path, source, overlong="split", **fields)
    assert [(record_of(row["invoke"]), part_of(row["invoke"]), row["key"], row["token_ids"]) for row in rows] == [
        (0, 0, "p0", [1, 2]),
        (1, 0, "p1", [10, 11, 12, 13]),
        (1, 1, "p1", [14, 15, 16, 17]),
        (1, 2, "p1", [18]),
        (2, 0, "p2", [3]),
    ]
    assert [row["invoke"] for row in rows if part_of(row["invoke"]) == 0] == [0, 1, 2]
    assert not any(row["truncated"] for row in rows) and not skipped


def test_every_part_of_a_split_text_starts_with_bos(tmp_path: Path, source: TokenizerSource) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"text": "The quick brown fox jumps over the lazy dog. " * 5})
    whole = invokes_of(path, source, max_length=1000)[0][0]["token_ids"]
    parts = [row["token_ids"] for row in invokes_of(path, source, max_length=12, overlong="split")[0]]
    assert all(part[0] == BOS and len(part) <= 11 for part in parts)
    assert [token for part in parts for token in part[1:]] == whole[1:]


def test_parts_of_a_chat_get_no_marker_that_is_only_named_bos(tmp_path: Path, source: TokenizerSource) -> None:
    """As in SmolLM2 and Qwen: BOS is `<|im_start|>`, which the template writes and the tokenizer never adds."""
    folder = Path(train_tokenizer(tmp_path / "tokenizer"))
    fast = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**fast, "post_processor": None}))
    fields = json.loads((folder / "tokenizer_config.json").read_text())
    fields["chat_template"] = "{{ bos_token }}{{ messages[0]['content'] }}"
    (folder / "tokenizer_config.json").write_text(json.dumps({**fields, "add_bos_token": False}))
    path = write_lines(tmp_path / "a.jsonl", {"m": [{"role": "user", "content": "one two three four five six"}]})
    rows, _ = invokes_of(
        path, TokenizerSource(name=str(folder)), dataset={"messages_column": "m"}, max_length=5, overlong="split"
    )
    assert len(rows) > 2
    assert [row["token_ids"][0] == BOS for row in rows] == [True] + [False] * (len(rows) - 1)


@pytest.fixture(scope="module")
def encoder(source: TokenizerSource) -> Encoder:
    return Encoder(settings_for(source, overlong="split"))


def settings_for(source: TokenizerSource, **fields: Any) -> EncoderSettings:
    defaults: dict[str, Any] = {
        "kind": "tokens",
        "add_special_tokens": True,
        "add_generation_prompt": False,
        "overlong": "refuse",
        "max_prompt_tokens": 7,
        "n_vocabulary": None,
    }
    return EncoderSettings(tokenizer=source, **{**defaults, **fields})


def record_batch(kind: str, values: list[Any], first: int = 0) -> RecordBatch:
    type = pa.large_list(pa.int64()) if kind == "tokens" else pa.large_string()
    columns = [
        pa.array(range(first, first + len(values)), pa.int64()),
        pa.nulls(len(values), pa.string()),
        pa.array(values, type),
    ]
    table = pa.record_batch(columns, names=["invoke", "key", kind])
    return RecordBatch(table=table, problems=(), n_records=len(values))


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(-2, 1030), min_size=1, max_size=30), max_size=8))
def test_splitting_loses_and_doubles_nothing(encoder: Encoder, prompts: list[list[int]]) -> None:
    encoded = encoder.encode(record_batch("tokens", prompts))
    rows = encoded.invokes.to_pylist()
    joined: dict[int, list[int]] = {}
    for row in rows:
        assert 1 <= row["n_prompt_tokens"] <= 7
        assert part_of(row["invoke"]) == -(-len(joined.get(record_of(row["invoke"]), [])) // 7)
        joined.setdefault(record_of(row["invoke"]), []).extend(row["token_ids"])
    legal = {i: prompt for i, prompt in enumerate(prompts) if all(0 <= token < 1024 for token in prompt)}
    assert joined == legal
    assert [problem.invoke for problem in encoded.skipped] == [i for i in range(len(prompts)) if i not in legal]
    assert len({row["invoke"] for row in rows}) == len(rows)


def test_ids_outside_the_vocabulary_are_listed(tmp_path: Path, source: TokenizerSource) -> None:
    path = write_tokens(tmp_path / "a.jsonl", [1023], [5, -1], [5, 6, 1024], [2**40])
    rows, skipped = invokes_of(path, source, dataset=TOKENS)
    assert [row["invoke"] for row in rows] == [0]
    assert [problem.reason for problem in skipped] == ["bad_tokens"] * 3
    assert skipped[1].detail == "token 2 has the id 1024; the model's vocabulary is 0..1023"
    rows, _ = invokes_of(path, source, dataset=TOKENS, n_vocabulary=1025)
    assert [row["invoke"] for row in rows] == [0, 2], "a padded embedding knows more ids than the tokenizer"


def test_text_without_a_token_is_listed(tmp_path: Path, source: TokenizerSource) -> None:
    stripped = Path(train_tokenizer(tmp_path / "tokenizer"))
    fast = FastTokenizer.from_file(str(stripped / "tokenizer.json"))
    fast.normalizer = normalizers.Replace(Regex(r"\s"), "")
    fast.save(str(stripped / "tokenizer.json"))
    path = write_lines(tmp_path / "a.jsonl", {"text": "word"}, {"text": " \t "})
    rows, skipped = invokes_of(path, TokenizerSource(name=str(stripped)), add_special_tokens=False)
    assert [row["invoke"] for row in rows] == [0]
    assert [(problem.invoke, problem.reason) for problem in skipped] == [(1, "no_tokens")]
    rows, _ = invokes_of(path, TokenizerSource(name=str(stripped)))
    assert rows[1]["token_ids"] == [BOS]


def test_messages_become_invokes(tmp_path: Path, source: TokenizerSource) -> None:
    chat = [{"role": "user", "content": "hi"}]
    path = write_lines(tmp_path / "a.jsonl", {"m": chat}, {"m": [{"role": "user"}]}, {"m": chat})
    rows, skipped = invokes_of(path, source, dataset={"messages_column": "m"})
    assert [row["invoke"] for row in rows] == [0, 2]
    assert [(problem.invoke, problem.reason) for problem in skipped] == [(1, "bad_messages")]
    longer, _ = invokes_of(path, source, dataset={"messages_column": "m"}, add_generation_prompt=True)
    prompted = longer[0]["token_ids"]
    assert prompted[: len(rows[0]["token_ids"])] == rows[0]["token_ids"] and len(prompted) > len(rows[0]["token_ids"])


def test_bad_records_can_be_refused(tmp_path: Path, source: TokenizerSource) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"text": "a"}, {"text": None}, {"text": "b" * 500})
    with pytest.raises(DatasetError, match=r'record 1: null, a.jsonl line 2: .*bad_records = "skip"'):
        invokes_of(path, source, bad_records="refuse", overlong="skip")
    with pytest.raises(DatasetError, match="longer than the model takes; record 2"):
        invokes_of(path, source)


def test_a_dataset_without_a_usable_record(tmp_path: Path, source: TokenizerSource) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"text": None}, {"text": ""})
    with pytest.raises(DatasetError, match="none of the dataset's 2 records can be used; record 0: null"):
        invokes_of(path, source)


# -- processes -------------------------------------------------------------------------------------------------------


def test_processes_give_the_same_invokes_in_the_same_order(
    tmp_path: Path, source: TokenizerSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [{"text": f"prompt {index} " * (index % 40)} for index in range(8000)]
    path = write_lines(tmp_path / "a.jsonl", *records)
    alone = invokes_of(path, source, max_length=50, overlong="split")
    monkeypatch.setattr(tokenization, "SMALL_BYTES", 10_000)
    assert invokes_of(path, source, max_length=50, overlong="split", processes=2) == alone
    assert len(alone[1]) == 200


class UnevenEncoder:
    """An encoder that takes its time, more for some batches than for others."""

    def __init__(self, encoder: Encoder, fails_at: int | None = None) -> None:
        self._encoder = encoder
        self._fails_at = fails_at
        self.info = encoder.info
        self.is_closed = False

    def encode(self, batch: RecordBatch) -> TokenizedBatch:
        first = batch.table.column("invoke")[0].as_py()
        if first == self._fails_at:
            raise RunError("it died")
        time.sleep(0.02 if first % 7 == 0 else 0.001)
        return self._encoder.encode(batch)

    def close(self) -> None:
        self.is_closed = True


def numbered_batches(n: int) -> Iterator[RecordBatch]:
    for number in range(n):
        yield record_batch("tokens", [[number]], first=number)


def test_batches_keep_their_order_though_some_take_longer(encoder: Encoder) -> None:
    encoders = [UnevenEncoder(encoder) for _ in range(4)]
    tokens = Tokenization(numbered_batches(100), list(encoders), TokenizationConfig())
    assert [batch.invokes["invoke"].to_pylist() for batch in tokens] == [[number] for number in range(100)]
    assert all(each.is_closed for each in encoders)


def test_ending_early_closes_everything_and_reads_little_ahead(encoder: Encoder) -> None:
    encoders = [UnevenEncoder(encoder) for _ in range(2)]
    batches = numbered_batches(1000)
    with Tokenization(batches, list(encoders), TokenizationConfig()) as tokens:
        next(iter(tokens))
    assert all(each.is_closed for each in encoders)
    assert next(batches).table["invoke"].to_pylist()[0] < 10


def test_an_error_in_the_middle_comes_at_its_place(encoder: Encoder) -> None:
    encoders = [UnevenEncoder(encoder, fails_at=20) for _ in range(3)]
    seen: list[int] = []
    with pytest.raises(RunError, match="it died"):
        for batch in Tokenization(numbered_batches(1000), list(encoders), TokenizationConfig()):
            seen += batch.invokes["invoke"].to_pylist()
    assert seen == list(range(20))
    assert all(each.is_closed for each in encoders)


def test_errors_cross_the_pipe(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    worker = WorkerProcess(settings_for(TokenizerSource(name=str(tmp_path / "empty"))), parallel=False)
    try:
        with pytest.raises(ConfigError, match="has no tokenizer"):
            _ = worker.info
    finally:
        worker.close()


def test_a_process_that_dies_is_reported(source: TokenizerSource) -> None:
    worker = WorkerProcess(settings_for(source), parallel=False)
    try:
        assert worker.encode(record_batch("tokens", [[1, 2]])).invokes.num_rows == 1
        worker._process.kill()
        with pytest.raises(RunError, match="exit code -9"):
            worker.encode(record_batch("tokens", [[1, 2]]))
    finally:
        worker.close()


SCRIPT = """
import sys
from harvest.config import DatasetConfig, TokenizationConfig
from harvest.dataset import open_dataset
from harvest.tokenization import Tokenization, tokenize
from harvest.tokenizer import TokenizerSource

dataset = open_dataset(DatasetConfig(path=sys.argv[1]))
config = TokenizationConfig()
with tokenize(dataset, TokenizerSource(name=sys.argv[2]), config, max_length=100) as tokens:
    print(next(iter(tokens)).invokes.num_rows)
    print([name for name in ("torch", "transformers", "vllm", "ray") if name in sys.modules], flush=True)
    sys.stdin.read()
"""


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_plain_script_needs_no_main_guard_no_torch_and_leaves_no_process(
    tmp_path: Path, source: TokenizerSource
) -> None:
    path = write_lines(tmp_path / "a.jsonl", {"text": "a"}, {"text": "b"})
    (tmp_path / "script.py").write_text(SCRIPT)
    root = str(Path(tokenization.__file__).parent.parent)
    with subprocess.Popen(
        [sys.executable, "-W", "error", str(tmp_path / "script.py"), str(path), source.name],
        env={**os.environ, "PYTHONPATH": root},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as script:
        assert script.stdout is not None and script.stderr is not None
        lines = [script.stdout.readline().strip() for _ in range(2)]
        children = psutil.Process(script.pid).children(recursive=True)
        script.kill()
        errors = script.stderr.read()
    assert lines == ["2", "[]"], errors
    assert len(children) == 1
    assert errors == ""
    deadline = time.monotonic() + 30
    while any(map(is_alive, children)):
        assert time.monotonic() < deadline, "a tokenising process outlives its parent"
        time.sleep(0.05)
