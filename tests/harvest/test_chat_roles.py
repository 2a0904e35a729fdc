"""Rows by role: each token of a chat belongs to the right message, or the record says why it cannot be told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harvest.chat_roles import TEMPLATE, Content, RolesError, as_spans, find_contents, tokens_of_roles
from harvest.config import parse_config
from harvest.dataset_checks import Bad
from harvest.errors import ConfigError, DatasetError, PlanError
from harvest.runs import open_or_plan
from harvest.tokenizer import EncodedRoles, Tokenizer, TokenizerSource
from harvest.verification import verify_run
from storage.label_check import label_problems
from storage.reader import StoreReader
from storage.run_folder import RunFolder
from tests.harness import harvest_config
from tests.harvest.written_datasets import write_lines
from tests.tiny_models import train_tokenizer

# Templates as models have them: ids of roles in the text itself, system merged into the user's turn, trimmed contents.
CHATML = (
    "{% if messages[0]['role'] != 'system' %}<|role|>system\nYou are a user's assistant.<|turn|>\n{% endif %}"
    "{% for m in messages %}{{ '<|role|>' + m['role'] + '\n' + m['content'] + '<|turn|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|role|>assistant\n' }}{% endif %}"
)
TRIMMED = "{% for m in messages %}{{ '[' + m['role'] + '] ' + m['content'] | trim + '\n' }}{% endfor %}"
MERGED = (
    "{% set ns = namespace(s='') %}{% for m in messages %}{% if m['role'] == 'system' %}{% set ns.s = m['content'] + "
    "'\n\n' %}{% else %}{{ m['role'] + ': ' + ns.s + m['content'] + '\n' }}{% set ns.s = '' %}{% endif %}{% endfor %}"
)
THINKING = (
    "{% for m in messages %}{% set c = m['content'] %}{% if '</think>' in c and not loop.last %}"
    "{% set c = c.split('</think>')[-1] %}{% endif %}{{ '<|role|>' + m['role'] + '\n' + c + '<|turn|>\n' }}{% endfor %}"
)
CHAT = [
    {"role": "system", "content": "user"},
    {"role": "user", "content": "assistant"},
    {"role": "assistant", "content": "The user and the assistant."},
    {"role": "user", "content": "user"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def tokenizer_with(folder: Path, target: Path, template: str | None = None) -> Tokenizer:
    target.mkdir(exist_ok=True)
    (target / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    content = json.loads((folder / "tokenizer_config.json").read_text())
    (target / "tokenizer_config.json").write_text(
        json.dumps({**content, "chat_template": template} if template else content)
    )
    return Tokenizer(TokenizerSource(name=str(target)), for_messages=True, for_roles=True)


def encode(tokenizer: Tokenizer, chat: Any, roles: list[str], prompted: bool = False) -> EncodedRoles | Bad:
    return tokenizer.encode_roles([json.dumps(chat)], add_generation_prompt=prompted, roles=roles)[0]


def text_of(tokenizer: Tokenizer, chat: Any, roles: list[str], prompted: bool = False) -> list[str]:
    """The text of each kept stretch."""
    encoded = encode(tokenizer, chat, roles, prompted)
    assert isinstance(encoded, EncodedRoles), encoded
    (plain,) = tokenizer.encode_messages([json.dumps(chat)], add_generation_prompt=prompted)
    assert encoded.token_ids == plain, "the same tokens as without roles"
    spans = as_spans(encoded.kept)
    decode = tokenizer._tokenizer.decode
    return [
        decode(plain[a:b], clean_up_tokenization_spaces=False) for a, b in zip(spans[::2], spans[1::2], strict=True)
    ]


def test_contents_are_found_by_place_not_by_their_words(folder: Path, tmp_path: Path) -> None:
    tokenizer = tokenizer_with(folder, tmp_path / "t", CHATML)
    assert text_of(tokenizer, CHAT, ["user"]) == ["assistant", "user"]
    assert text_of(tokenizer, CHAT, ["assistant"]) == ["The user and the assistant."]
    assert text_of(tokenizer, CHAT, ["system", "assistant"]) == ["user", "The user and the assistant."]
    # A default system prompt is the template's.
    assert text_of(tokenizer, CHAT[1:], ["system"]) == []
    assert "You are a user's assistant." in text_of(tokenizer, CHAT[1:], [TEMPLATE])[0]


def test_template_and_all_roles_together_are_every_token(folder: Path, tmp_path: Path) -> None:
    tokenizer = tokenizer_with(folder, tmp_path / "t", CHATML)
    for prompted in (False, True):
        parts = [encode(tokenizer, CHAT, [role], prompted) for role in ("system", "user", "assistant", TEMPLATE)]
        total = np.sum([part.kept for part in parts if isinstance(part, EncodedRoles)], axis=0)
        assert (total == 1).all()
    assert text_of(tokenizer, CHAT, [TEMPLATE], prompted=True)[-1].endswith("<|role|>assistant\n")


def test_trimmed_merged_empty_and_parted_contents(folder: Path, tmp_path: Path) -> None:
    trimmed = tokenizer_with(folder, tmp_path / "a", TRIMMED)
    chat: list[dict[str, Any]]
    chat = [{"role": "user", "content": "\n  How so? \n"}, {"role": "assistant", "content": " So."}]
    assert [text.strip() for text in text_of(trimmed, chat, ["user"])] == ["How so?"]
    assert [text.strip() for text in text_of(trimmed, chat, ["assistant"])] == ["So."]
    merged = tokenizer_with(folder, tmp_path / "b", MERGED)
    assert [text.strip() for text in text_of(merged, CHAT, ["system"])] == ["user"]
    plain = tokenizer_with(folder, tmp_path / "c", CHATML)
    nothings: tuple[Any, ...] = (None, "", [])
    for empty in nothings:
        chat = [{"role": "user", "content": empty}, {"role": "assistant", "content": ["a", {"text": "b"}]}]
        assert text_of(plain, chat, ["user"]) == []
        assert text_of(plain, chat, ["assistant"]) == ["a\nb"]


def test_a_template_that_rewrites_a_content_makes_a_bad_record(folder: Path, tmp_path: Path) -> None:
    tokenizer = tokenizer_with(folder, tmp_path / "t", THINKING)
    thought = {"role": "assistant", "content": "<think>hm</think>Yes."}
    assert text_of(tokenizer, [thought], ["assistant"]) == ["<think>hm</think>Yes."]
    bad = encode(tokenizer, [thought, {"role": "user", "content": "Sure?"}], ["user"])
    assert isinstance(bad, Bad) and bad.reason == "unclear_roles"
    assert "another text than the content of message 0" in bad.detail
    twice = tokenizer_with(
        folder, tmp_path / "u", "{% for m in messages %}{{ m['content'] + m['content'] }}{% endfor %}"
    )
    bad = encode(twice, [thought], ["user"])
    assert isinstance(bad, Bad) and "prints the content of message 0 2 times" in bad.detail
    picky = "{% for m in messages %}{{ '!' if m['content'] == 'a' else '?' }}{{ m['content'] }}{% endfor %}"
    bad = encode(tokenizer_with(folder, tmp_path / "v", picky), [{"role": "user", "content": "a"}], ["user"])
    assert isinstance(bad, Bad) and "begins otherwise" in bad.detail
    bad = encode(tokenizer, [{"role": "user"}], ["user"])
    assert isinstance(bad, Bad) and bad.reason == "bad_messages"


def test_space_that_could_be_anyones_is_not_guessed() -> None:
    messages = [{"role": "user", "content": "a "}, {"role": "user", "content": "b "}]

    def render(chat: list[dict[str, Any]]) -> str:
        return "".join(message["content"] + " " for message in chat)

    with pytest.raises(RolesError, match="white space"):
        # One content trimmed and one not; which one cannot be told from "a  b ".
        find_contents([*messages, {"role": "user", "content": " "}], "a  b   ", render)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["system", "user", "assistant", "tool"]),
            st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from(list("user \n:assistant")), max_size=12),
        ),
        min_size=1,
        max_size=5,
    ),
    st.sampled_from(["role", "user", "assistant"]),
)
def test_every_character_of_a_chat_is_told_apart(chat: list[tuple[str, str]], word: str) -> None:
    """Any contents, under a template whose markup is made of words that contents hold too."""
    messages = [{"role": role, "content": content} for role, content in chat]

    def render(other: list[dict[str, Any]]) -> str:
        return "".join(f"{word}:{message['role']}\n{message['content']}\n" for message in other)

    text, expected, at = render(messages), [], 0
    for message in messages:
        start = at + len(f"{word}:{message['role']}\n")
        at = start + len(message["content"]) + 1
        if message["content"]:
            expected.append(Content(start=start, stop=at - 1, role=message["role"]))
    try:
        found = find_contents(messages, text, render)
    except RolesError as error:
        assert "white space" in str(error)
        return
    assert found == expected
    # One token a character: kept are the characters of the role that are no white space, and what lies between them.
    offsets = np.stack([np.arange(len(text)), np.arange(len(text)) + 1], axis=1)
    kept = tokens_of_roles(offsets, text, found, ["user"])
    inside = np.zeros(len(text), np.bool_)
    for content in expected:
        if content.role == "user":
            inside[content.start : content.stop] = True
    assert (kept == inside).all()


def test_a_token_across_a_border_is_the_messages_if_only_white_space_is_outside() -> None:
    text = "User: hi.\nend"
    contents = [Content(start=6, stop=9, role="user")]
    offsets = np.array([[0, 4], [4, 5], [5, 8], [8, 10], [9, 9], [10, 13], [8, 13], [5, 6], [9, 10]])
    user = tokens_of_roles(offsets, text, contents, ["user"])
    assert user.tolist() == [False, False, True, True, False, False, False, False, False]
    assert (tokens_of_roles(offsets, text, contents, [TEMPLATE]) == ~user).all()


# -- through plan, engine and store ----------------------------------------------------------------------------------


def config_of(folder: Path, data: Path, store: Path, **changes: Any) -> Any:
    return parse_config(
        {
            "model": {"name": str(folder), "dtype": "float32"},
            "dataset": {"path": str(data), "messages_column": "messages"},
            "tokenization": {"processes": 1, **changes.pop("tokenization", {})},
            "capture": {"locations": ["residual.1"], "rows": {"roles": ["assistant"]}, **changes.pop("capture", {})},
            "store": {"path": str(store), "dtype": "float32"},
            "engine": {"vllm": {"max_num_seqs": 4, "max_num_batched_tokens": 32}},
            **changes,
        }
    )


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    long = [{"role": role, "content": "the type of an object " * 4} for role in ("user", "assistant") * 3]
    return write_lines(
        tmp_path / "chats.jsonl",
        {"messages": CHAT},
        {"messages": long},
        {"messages": [{"role": "user", "content": "no answer"}]},
        {"messages": [*CHAT, {"role": "assistant", "content": "And more."}]},
    )


def test_rows_of_a_role_are_harvested_and_verified(tiny_qwen3: Path, chats: Path, tmp_path: Path) -> None:
    # Answers are generated too, so that generated rows stand beside the chosen prompt rows.
    capture = {
        "rows": {"roles": ["assistant"], "source": "both", "skip_first": 2},
        "generation": {"max_tokens": 4, "ignore_eos": True},
    }
    config = config_of(tiny_qwen3, chats, tmp_path / "run", capture=capture)
    with RunFolderRead(open_or_plan(config).path) as plan:
        assert all(row["row_spans"] is not None for row in plan)
    reader = harvest_config(config)
    tokenizer = Tokenizer(TokenizerSource(name=str(tiny_qwen3)), for_messages=True, for_roles=True)
    for invoke, chat in enumerate(json.loads(line)["messages"] for line in chats.read_text().splitlines()):
        encoded = encode(tokenizer, chat, ["assistant"])
        assert isinstance(encoded, EncodedRoles)
        stored = reader.prompt(invoke)
        n_prompt = len(encoded.token_ids)
        assert stored.positions.tolist() == [*np.flatnonzero(encoded.kept), *range(n_prompt, n_prompt + 3)]
        assert stored.row_spans is not None and as_spans(encoded.kept) == stored.row_spans.reshape(-1).tolist()
    report = verify_run(tmp_path / "run")
    assert report.store.ok and not report.store.findings, report.store.findings


class RunFolderRead:
    """The planned invokes of a run, as rows."""

    def __init__(self, path: Path) -> None:
        folder = RunFolder.open(path)
        units = range(folder.layout.n_units)
        self.rows = [row for unit in units for row in folder.plan.read_unit(unit).to_pylist()]

    def __enter__(self) -> list[dict[str, Any]]:
        return self.rows

    def __exit__(self, *arguments: object) -> None:
        """Nothing is open."""


def test_a_reduced_role_is_its_mean_and_labels_outside_spans_are_found(
    tiny_qwen3: Path, chats: Path, tmp_path: Path
) -> None:
    capture = {"rows": {"roles": ["assistant"], "reduce": "mean"}}
    reader = harvest_config(config_of(tiny_qwen3, chats, tmp_path / "run", capture=capture))
    report = verify_run(tmp_path / "run", parity=4)
    assert report.passed, (report.store.findings, report.parity)
    assert [row["reason"] for row in reader.run.plan.skipped().to_pylist()] == ["no_rows"]
    unit = reader.unit_of(1)
    plan = reader.run.plan.read_unit(unit).to_pydict()
    labels = {
        name: reader.array(name, reader.layout.rows_of(unit)).copy()
        for name in ("tokens/id", "tokens/position", "tokens/invoke")
    }
    assert not list(label_problems(reader.layout, reader.receipt(unit), plan, labels))
    row = reader.prompt(1).row_start - reader.layout.rows_of(unit).start
    labels["tokens/position"][row] = 0
    labels["tokens/id"][row] = reader.prompt(1).prompt_token_ids[0]
    (problem,) = label_problems(reader.layout, reader.receipt(unit), plan, labels)
    assert problem == "invoke 1 has rows of tokens outside its spans"


@pytest.mark.parametrize("overlong", ["truncate", "split"])
def test_cut_and_split_prompts_keep_their_spans(tiny_qwen3: Path, chats: Path, tmp_path: Path, overlong: str) -> None:
    changes: dict[str, Any] = {
        "tokenization": {"overlong": overlong, "processes": 1},
        "model": {"name": str(tiny_qwen3), "max_length": 21},
    }
    config = config_of(
        tiny_qwen3, chats, tmp_path / "run", capture={"rows": {"roles": ["assistant", "template"]}}, **changes
    )
    tokenizer = Tokenizer(TokenizerSource(name=str(tiny_qwen3)), for_messages=True, for_roles=True)
    encoded = [
        encode(tokenizer, json.loads(line)["messages"], ["assistant", "template"])
        for line in chats.read_text().splitlines()
    ]
    got: dict[str, list[bool]] = {}
    with RunFolderRead(open_or_plan(config).path) as plan:
        for row in sorted(plan, key=lambda row: row["invoke"]):
            kept = np.zeros(row["n_prompt_tokens"], np.bool_)
            for begin, end in zip(row["row_spans"][::2], row["row_spans"][1::2], strict=True):
                kept[begin:end] = True
            is_later_part = row["invoke"] >= len(encoded)
            assert not is_later_part or (row["token_ids"][0] == 0 and kept[0]), "BOS again, which is the template's"
            key = row["key"].partition("#")[0] if is_later_part else str(row["invoke"])
            got.setdefault(key, []).extend(kept[int(is_later_part) :].tolist())
    for record, whole in enumerate(encoded):
        assert isinstance(whole, EncodedRoles)
        expected = whole.kept.tolist()[: 20 if overlong == "truncate" else None]
        assert got[str(record)] == expected


def test_settings_that_cannot_be_met_are_named(tiny_qwen3: Path, chats: Path, tmp_path: Path) -> None:
    with pytest.raises(
        PlanError, match="has the role asistant, so there are no rows of it; the roles are assistant, system, u"
    ):
        open_or_plan(config_of(tiny_qwen3, chats, tmp_path / "a", capture={"rows": {"roles": ["asistant", "user"]}}))
    with pytest.raises(ConfigError, match=r"capture.rows.roles needs chat messages: set dataset.messages_column"):
        config_of(tiny_qwen3, chats, tmp_path / "b", dataset={"path": str(chats)})
    generated = {"rows": {"roles": ["user"], "source": "generated"}, "generation": {"max_tokens": 3}}
    with pytest.raises(ConfigError, match="roles picks tokens of the prompt"):
        config_of(tiny_qwen3, chats, tmp_path / "c", capture=generated)
    with pytest.raises(ConfigError, match="at least 1 item"):
        config_of(tiny_qwen3, chats, tmp_path / "d", capture={"rows": {"roles": []}})


def test_a_slow_tokenizer_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import PreTrainedTokenizerFast

    monkeypatch.setattr(PreTrainedTokenizerFast, "is_fast", property(lambda self: False))
    source = TokenizerSource(name=str(folder))
    Tokenizer(source, for_messages=True)
    with pytest.raises(ConfigError, match=r"capture.rows.roles needs a fast tokenizer"):
        Tokenizer(source, for_messages=True, for_roles=True)


def test_unclear_records_are_listed_or_refused(tiny_qwen3: Path, tmp_path: Path) -> None:
    import shutil

    model = tmp_path / "model"
    shutil.copytree(tiny_qwen3, model)
    content = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**content, "chat_template": THINKING}))
    (model / "chat_template.jinja").unlink(missing_ok=True)
    thought = {"role": "assistant", "content": "<think>hm</think>Yes."}
    data = write_lines(
        tmp_path / "chats.jsonl", {"messages": [thought]}, {"messages": [thought, {"role": "user", "content": "Sure?"}]}
    )
    planned = open_or_plan(config_of(model, data, tmp_path / "a"))
    (skipped,) = RunFolder.open(planned.path).plan.skipped().to_pylist()
    assert (skipped["invoke"], skipped["reason"]) == (1, "unclear_roles")
    with pytest.raises(DatasetError, match=r"record 1: unclear_roles, .*message 0"):
        open_or_plan(config_of(model, data, tmp_path / "b", tokenization={"bad_records": "refuse"}))


def test_plans_without_roles_have_no_spans(tiny_qwen3: Path, chats: Path, tmp_path: Path) -> None:
    path = open_or_plan(config_of(tiny_qwen3, chats, tmp_path / "run", capture={"rows": {}})).path
    with RunFolderRead(path) as plan:
        assert all("row_spans" not in row for row in plan)
    assert StoreReader(Path(__file__).parents[1] / "storage/golden/v1-plain").prompt(0).row_spans is None
