"""One tokenizer: special tokens once, chat messages as the template has them, clear refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harvest.dataset_checks import Bad
from harvest.errors import ConfigError
from harvest.tokenizer import Tokenizer, TokenizerSource, parse_messages
from tests.tiny_models import train_tokenizer

BOS, EOS = 0, 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(TokenizerSource(name=str(folder)), for_messages=True)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def edit_settings(folder: Path, target: Path, **changes: Any) -> Path:
    target.mkdir()
    (target / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.update(changes)
    (target / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in settings.items() if v is not None}))
    return target


def test_texts_are_encoded_as_transformers_does(tokenizer: Tokenizer, reference: Any) -> None:
    texts = ["The first prompt.", " and größer 🙂", "x"]
    for special in (True, False):
        expected = [reference.encode(text, add_special_tokens=special) for text in texts]
        assert tokenizer.encode_texts(texts, add_special_tokens=special) == expected
    assert all(ids[0] == BOS for ids in tokenizer.encode_texts(texts, add_special_tokens=True))
    assert tokenizer.encode_texts([], add_special_tokens=True) == []


@settings(deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=5))
def test_no_character_is_lost(tokenizer: Tokenizer, reference: Any, texts: list[str]) -> None:
    encoded = tokenizer.encode_texts(texts, add_special_tokens=False)
    assert [reference.decode(ids, clean_up_tokenization_spaces=False) for ids in encoded] == texts


def test_bos_is_never_doubled(tokenizer: Tokenizer, reference: Any) -> None:
    bos = reference.bos_token
    plain, marked, twice = tokenizer.encode_texts(["word", bos + "word", bos + bos + "word"], add_special_tokens=True)
    assert plain[0] == BOS and plain[1] != BOS
    assert marked == plain
    assert twice == [BOS, *plain], "what the text itself doubles is the text's own affair"
    assert tokenizer.encode_texts([bos + "word", "word"], add_special_tokens=False) == [plain, plain[1:]]


def test_a_bos_that_the_tokenizer_does_not_add_is_ordinary_text(folder: Path, tmp_path: Path, reference: Any) -> None:
    made = edit_settings(folder, tmp_path / "t", add_bos_token=False)
    fast = json.loads((made / "tokenizer.json").read_text())
    (made / "tokenizer.json").write_text(json.dumps({**fast, "post_processor": None}))
    tokenizer = Tokenizer(TokenizerSource(name=str(made)))
    assert tokenizer.info.bos_id == BOS and not tokenizer.info.adds_bos
    bos = reference.bos_token
    once, twice = tokenizer.encode_texts([bos + "word", bos + bos + "word"], add_special_tokens=True)
    assert twice == [BOS, *once] and once[0] == BOS


def test_info_names_all_special_tokens(tokenizer: Tokenizer, reference: Any) -> None:
    info = tokenizer.info
    assert (info.n_tokens, info.bos_id, info.adds_bos, info.eos_id) == (1024, BOS, True, EOS)
    marked = {id for id, token in reference.added_tokens_decoder.items() if token.special}
    assert set(info.special_ids) == marked
    assert len(marked) > 3, "chat markers are among them"


def test_messages_are_rendered_by_the_template(tokenizer: Tokenizer, reference: Any) -> None:
    chat = [{"role": "user", "content": "How?"}, {"role": "assistant", "content": "So."}]
    for prompted in (False, True):
        (ids,) = tokenizer.encode_messages([json.dumps(chat)], add_generation_prompt=prompted)
        expected = reference.apply_chat_template(chat, add_generation_prompt=prompted, return_dict=False)
        assert ids == expected


def test_a_template_that_writes_bos_has_it_once(folder: Path, tmp_path: Path) -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    made = edit_settings(folder, tmp_path / "t", chat_template=template)
    tokenizer = Tokenizer(TokenizerSource(name=str(made)), for_messages=True)
    (ids,) = tokenizer.encode_messages([json.dumps([{"role": "user", "content": "word"}])], add_generation_prompt=False)
    assert ids == tokenizer.encode_texts(["word"], add_special_tokens=True)[0]


def test_content_null_and_in_parts(tokenizer: Tokenizer) -> None:
    def encode(content: Any) -> Any:
        return tokenizer.encode_messages(
            [json.dumps([{"role": "user", "content": content}])], add_generation_prompt=False
        )

    assert encode(None) == encode("")
    assert encode([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]) == encode("a\nb")
    assert encode([{"text": "a"}]) == encode(["a"]) == encode("a")


def test_fields_of_messages_are_normalised() -> None:
    call = {"function": {"name": "f", "arguments": '{"x": 1}'}}
    chat = [{"role": "assistant", "content": None, "name": None, "tool_calls": [call]}]
    assert parse_messages(json.dumps(chat)) == [
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]}
    ]
    assert parse_messages('[{"role": "assistant", "tool_calls": [{"function": {"arguments": "no json"}}, 3]}]') == [
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": "no json"}}, 3]}
    ]


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ("{", "no JSON"),
        ("{}", "not a list"),
        ("[]", "at least one message"),
        ("[3]", "message 0 is int"),
        ('[{"content": "a"}]', 'message 0 has no text "role"; its keys: content'),
        ('[{"role": null, "content": "a"}]', 'no text "role"'),
        ('[{"role": "user", "content": "a"}, {"role": "user"}]', 'message 1 has no "content"'),
        ('[{"role": "user", "content": 3}]', "content is int"),
        ('[{"role": "user", "content": [3]}]', "part has no text"),
        ('[{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]', '"image_url"; only text'),
        ('[{"role": "user", "content": "\\ud800"}]', "lone surrogate"),
        ('[{"role": "user", "content": ["\\udfff"]}]', "lone surrogate"),
    ],
)
def test_malformed_messages_are_told_apart(tokenizer: Tokenizer, messages: str, words: str) -> None:
    good = json.dumps([{"role": "user", "content": "good"}])
    first, found, last = tokenizer.encode_messages([good, messages, good], add_generation_prompt=False)
    assert isinstance(found, Bad) and found.reason == "bad_messages"
    assert words in found.detail
    assert first == last and isinstance(first, list)


def test_a_template_that_refuses_a_conversation(folder: Path, tmp_path: Path) -> None:
    template = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('must start with user') }}{% endif %}x"
    made = edit_settings(folder, tmp_path / "t", chat_template=template)
    tokenizer = Tokenizer(TokenizerSource(name=str(made)), for_messages=True)
    (found,) = tokenizer.encode_messages(['[{"role": "system", "content": ""}]'], add_generation_prompt=False)
    assert isinstance(found, Bad) and "must start with user" in found.detail


def test_folders_without_a_usable_tokenizer(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no chat template"):
        made = edit_settings(folder, tmp_path / "plain", chat_template=None)
        Tokenizer(TokenizerSource(name=str(made)), for_messages=True)
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match=r"weights has no tokenizer .*set model.tokenizer"):
        Tokenizer(TokenizerSource(name=str(tmp_path / "weights")))
    broken = edit_settings(folder, tmp_path / "broken")
    (broken / "tokenizer.json").write_text('{"version": "1.0", "trunc')
    with pytest.raises(ConfigError, match=r"cannot load a tokenizer from .*broken"):
        Tokenizer(TokenizerSource(name=str(broken)))
    with pytest.raises(ConfigError, match="cannot load a tokenizer from no-such/model"):
        Tokenizer(TokenizerSource(name="no-such/model"))
