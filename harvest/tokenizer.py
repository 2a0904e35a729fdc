"""One tokenizer: text or chat messages to token ids.

The tokenizer is the one that `transformers` picks for the model. BOS is never doubled: what the tokenizer adds to a
text that already starts with it is taken off again, and rendered chat messages get no special tokens but their
template's.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harvest.chat_roles import RolesError, find_contents, tokens_of_roles
from harvest.dataset_checks import Bad
from harvest.errors import ConfigError

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tokenizer_config.json")
_FILE_PATTERNS = ("*.tiktoken", "*.spm", "*.model", "tekken.json", "tokenization_*.py")


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerSource:
    """Where a tokenizer comes from."""

    name: str
    """Local folder or Hugging Face id."""
    revision: str | None = None
    trust_remote_code: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerInfo:
    """What others need to know of a tokenizer."""

    n_tokens: int
    """Ids are below this number."""
    bos_id: int | None
    adds_bos: bool
    """The tokenizer itself puts BOS in front of a text. (Some name a chat marker as BOS and never add it.)"""
    eos_id: int | None
    special_ids: tuple[int, ...]
    """All special tokens: BOS, EOS, padding, chat markers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedRoles:
    """Token ids [S] of a conversation, which of them belong to the wanted roles, and the roles of its messages."""

    token_ids: list[int]
    kept: NDArray[np.bool_]
    roles: frozenset[str]


class Tokenizer:
    """A loaded tokenizer.

    Raises:
        ConfigError: there is none, it cannot be loaded, or chat messages need a template that it lacks, or their roles
            a fast tokenizer.
    """

    def __init__(self, source: TokenizerSource, *, for_messages: bool = False, for_roles: bool = False) -> None:
        self._tokenizer = _load(source)
        self._adds_bos = False
        plain, marked = (self.encode_texts(["a"], add_special_tokens=special)[0] for special in (False, True))
        bos_id = self._tokenizer.bos_token_id
        self._adds_bos = bos_id is not None and marked[:1] == [bos_id] != plain[:1]
        if for_messages and not getattr(self._tokenizer, "chat_template", None):
            raise ConfigError(
                f"the tokenizer of {source.name} has no chat template, which dataset.messages_column needs: set "
                "model.tokenizer to one that has, or give the prompts as text"
            )
        if for_roles and not self._tokenizer.is_fast:
            raise ConfigError(
                f"capture.rows.roles needs a fast tokenizer, which says what characters each token covers; that of "
                f"{source.name} is a slow one ({type(self._tokenizer).__name__}): set model.tokenizer to one with a "
                "tokenizer.json, or leave out capture.rows.roles"
            )

    @property
    def info(self) -> TokenizerInfo:
        """Ids of special tokens and the size of the vocabulary."""
        tokenizer = self._tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {})
        special = set(tokenizer.all_special_ids) | {id for id, token in added.items() if token.special}
        return TokenizerInfo(
            n_tokens=max(len(tokenizer), max(added, default=0) + 1),
            bos_id=tokenizer.bos_token_id,
            adds_bos=self._adds_bos,
            eos_id=tokenizer.eos_token_id,
            special_ids=tuple(sorted(int(id) for id in special)),
        )

    def encode_texts(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Token ids of each text."""
        if not texts:
            return []
        encoded: list[list[int]] = self._tokenizer(
            list(texts),
            add_special_tokens=add_special_tokens,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )["input_ids"]
        if not add_special_tokens or not self._adds_bos:
            return encoded
        bos, bos_id = self._tokenizer.bos_token, self._tokenizer.bos_token_id
        return [
            ids[1:] if ids[:2] == [bos_id, bos_id] and text.startswith(bos) else ids
            for text, ids in zip(texts, encoded, strict=True)
        ]

    def encode_messages(self, conversations: Sequence[str], *, add_generation_prompt: bool) -> list[list[int] | Bad]:
        """Token ids of each conversation (JSON text), or what is wrong with it."""
        rendered = [self._render(conversation, add_generation_prompt) for conversation in conversations]
        texts = [text for text in rendered if isinstance(text, str)]
        encoded = iter(self.encode_texts(texts, add_special_tokens=False))
        return [text if isinstance(text, Bad) else next(encoded) for text in rendered]

    def encode_roles(
        self, conversations: Sequence[str], *, add_generation_prompt: bool, roles: Collection[str]
    ) -> list[EncodedRoles | Bad]:
        """As `encode_messages`, with the tokens that belong to one of `roles`."""
        return [self._encode_roles(each, add_generation_prompt, roles) for each in conversations]

    def _encode_roles(
        self, conversation: str, add_generation_prompt: bool, roles: Collection[str]
    ) -> EncodedRoles | Bad:
        messages = parse_messages(conversation)
        if isinstance(messages, Bad):
            return messages
        text = self._render_messages(messages, add_generation_prompt)
        if isinstance(text, Bad):
            return text
        try:
            contents = find_contents(messages, text, lambda other: self._apply_template(other, add_generation_prompt))
        except RolesError as error:
            return Bad(reason="unclear_roles", detail=str(error))
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        offsets = np.array(encoded["offset_mapping"], np.int64).reshape(-1, 2)
        return EncodedRoles(
            token_ids=encoded["input_ids"],
            kept=tokens_of_roles(offsets, text, contents, roles),
            roles=frozenset(message["role"] for message in messages),
        )

    def _render(self, conversation: str, add_generation_prompt: bool) -> str | Bad:
        messages = parse_messages(conversation)
        return messages if isinstance(messages, Bad) else self._render_messages(messages, add_generation_prompt)

    def _apply_template(self, messages: list[dict[str, Any]], add_generation_prompt: bool) -> str:
        text = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt
        )
        assert isinstance(text, str)
        return text

    def _render_messages(self, messages: list[dict[str, Any]], add_generation_prompt: bool) -> str | Bad:
        try:
            text = self._apply_template(messages, add_generation_prompt)
        except Exception as error:  # a template is a program: it may raise whatever it likes
            return Bad(reason="bad_messages", detail=f"the chat template refuses it: {type(error).__name__}: {error}")
        return _encodable(text)


def parse_messages(conversation: str) -> list[dict[str, Any]] | Bad:
    """Check and normalise chat messages.

    `content` becomes one string: null is empty, text parts are joined by line ends (as vLLM does for templates that
    take strings). Null fields are dropped, as tables have them where a message lacks a field. Arguments of tool calls
    become objects, which is what templates print.
    """
    try:
        messages = json.loads(conversation)
    except (ValueError, RecursionError) as error:
        return _bad(f"no JSON: {error}")
    if not isinstance(messages, list) or not messages:
        return _bad("not a list with at least one message")
    parsed: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            return _bad(f"message {index} is {type(message).__name__}, not an object with role and content")
        if not isinstance(message.get("role"), str):
            return _bad(f'message {index} has no text "role"; its keys: {", ".join(map(str, message))}')
        if "content" not in message and not message.get("tool_calls"):
            return _bad(f'message {index} has no "content"; its keys: {", ".join(map(str, message))}')
        content = _join_content(message.get("content"))
        if isinstance(content, Bad):
            return _bad(f"message {index}: {content.detail}")
        fields = {name: value for name, value in message.items() if value is not None}
        parsed.append({**fields, "content": content})
        _parse_arguments(parsed[-1])
    return parsed


def _join_content(content: Any) -> str | Bad:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return _bad(f"content is {type(content).__name__}, not text, null or a list of parts")
    texts: list[str] = []
    for part in content:
        if isinstance(part, dict):
            kind = part.get("type", "text")
            if kind != "text":
                return _bad(f'a content part has the type "{kind}"; only text can be harvested')
            part = part.get("text")
        if not isinstance(part, str):
            return _bad("a content part has no text")
        texts.append(part)
    return "\n".join(texts)


def _encodable(text: str) -> str | Bad:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return _bad(f"character {error.start} of the rendered messages is a lone surrogate")
    return text


def _parse_arguments(message: dict[str, Any]) -> None:
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            try:
                function["arguments"] = json.loads(function["arguments"])
            except ValueError:
                continue  # not JSON: the template gets the text


def _bad(detail: str) -> Bad:
    return Bad(reason="bad_messages", detail=detail)


def _load(source: TokenizerSource) -> Any:
    folder = Path(source.name).expanduser()
    if folder.is_dir() and not (
        any((folder / name).is_file() for name in _FILES)
        or any(next(folder.glob(pattern), None) for pattern in _FILE_PATTERNS)
    ):
        raise ConfigError(
            f"the folder {folder} has no tokenizer (tokenizer.json, tokenizer.model, ...): set model.tokenizer to a "
            "folder or Hugging Face id that has"
        )
    from transformers import AutoTokenizer  # here, since it takes seconds

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder) if folder.is_dir() else source.name,
            revision=source.revision,
            trust_remote_code=source.trust_remote_code,
        )
    except Exception as error:  # transformers raises many kinds for a tokenizer that it cannot load
        summary = str(error).strip().split("\n")[0]
        raise ConfigError(
            f"cannot load a tokenizer from {source.name}: {type(error).__name__}: {summary}. Set model.tokenizer to a "
            "folder or Hugging Face id that has one"
        ) from error
    if not len(tokenizer):
        raise ConfigError(f"the tokenizer of {source.name} has an empty vocabulary: set model.tokenizer to another")
    return tokenizer
