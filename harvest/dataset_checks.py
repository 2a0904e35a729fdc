"""What one record may hold: its value and its id, or the reason why it cannot be used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

Kind = Literal["text", "tokens", "messages"]
Reason = Literal[
    "empty",
    "null",
    "not_text",
    "undecodable",
    "not_json",
    "bad_id",
    "bad_tokens",
    "bad_messages",
    "unclear_roles",
    "no_tokens",
    "overlong",
    "no_rows",
]

_INT64 = range(-(2**63), 2**63)

MISSING = msgspec.UNSET
"""The value of a record that does not have the column."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bad:
    """Stands where a record's value cannot be read."""

    reason: Reason
    detail: str


def check_text(raw: Any, column: str) -> str | Bad:
    if isinstance(raw, bytes):
        try:
            raw = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            return Bad(reason="undecodable", detail=explain_undecodable(error))
    if isinstance(raw, str):
        if not raw:
            return Bad(reason="empty", detail="the text is empty")
        return _check_surrogates(raw) or raw
    return _check_absent(raw, column) or Bad(reason="not_text", detail=f'"{column}" is {_show(raw)}, not text')


def _check_tokens(raw: Any, column: str) -> list[int] | Bad:
    if isinstance(raw, list):
        if not raw:
            return Bad(reason="empty", detail=f'"{column}" is an empty list')
        for index, token in enumerate(raw):
            if type(token) is not int or token not in _INT64:
                return Bad(reason="bad_tokens", detail=f'"{column}"[{index}] is {_show(token)}, not a token id')
        return raw
    return _check_absent(raw, column) or Bad(
        reason="bad_tokens", detail=f'"{column}" is {_show(raw)}, not a list of token ids'
    )


def _check_messages(raw: Any, column: str) -> str | Bad:
    if isinstance(raw, (str, bytes)):
        return check_text(raw, column)
    if isinstance(raw, list):
        if not raw:
            return Bad(reason="empty", detail=f'"{column}" is an empty list')
        try:
            return msgspec.json.encode(raw).decode("utf-8")
        except (TypeError, ValueError, RecursionError) as error:
            return Bad(reason="bad_messages", detail=f'"{column}": {error}')
    return _check_absent(raw, column) or Bad(
        reason="bad_messages", detail=f'"{column}" is {_show(raw)}, not a list of messages'
    )


CHECKS: dict[Kind, Callable[[Any, str], Any]] = {
    "text": check_text,
    "tokens": _check_tokens,
    "messages": _check_messages,
}


def check_key(raw: Any, column: str | None) -> str | Bad:
    if type(raw) is int:
        return str(raw)
    key = check_text(raw, str(column))
    return key if isinstance(key, str) else Bad(reason="bad_id", detail=f'id column "{column}": {key.detail}')


def _check_absent(raw: Any, column: str) -> Bad | None:
    if isinstance(raw, Bad):
        return raw
    if raw is None:
        return Bad(reason="null", detail=f'"{column}" is null')
    if raw is MISSING:
        return Bad(reason="null", detail=f'there is no "{column}" in this record')
    return None


def _check_surrogates(text: str) -> Bad | None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        return Bad(reason="undecodable", detail=f"character {error.start} is the lone surrogate U+{code:04X}")
    return None


def _show(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 40 else text[:37] + '...'} ({type(value).__name__})"


def explain_undecodable(error: UnicodeDecodeError) -> str:
    """Where and why bytes are no UTF-8."""
    return f"byte {error.start} (0x{error.object[error.start]:02x}) is no valid UTF-8: {error.reason}"
