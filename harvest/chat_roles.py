"""Which tokens of a rendered chat belong to which message: content by role, and the template's own markup.

The template is rendered twice: with the messages as they are, and with a mark in place of each content. What lies
between the marks is the template's; the first text must be those pieces with the contents between them, character for
character (a template may trim a content's white space). So the text of a message is found by its place, not by its
words, which may occur elsewhere too; and where a template does more to a content than trim it (takes out reasoning,
escapes, repeats), that is seen and said, never guessed.

A token belongs to a message if all its characters, but for white space at its ends, lie in that message's content. All
others are the template's. Pure: no tokenizer, no files.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

TEMPLATE = "template"
"""Stands among roles for tokens of the template itself: headers, separators, the generation prompt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Content:
    """Where a message's content lies in the rendered text: characters start..stop-1."""

    start: int
    stop: int
    role: str


class RolesError(ValueError):
    """The rendered text cannot be divided among the messages."""


def find_contents(
    messages: Sequence[dict[str, Any]], text: str, render: Callable[[list[dict[str, Any]]], str]
) -> list[Content]:
    """Where the contents of `messages` lie in `text`, in order of place.

    Args:
        messages: with `role` and `content`, a string; empty contents are nowhere.
        text: the messages as the template renders them.
        render: renders other messages just so; may raise whatever a template raises.

    Raises:
        RolesError: in words, which message is not where it should be.
    """
    word = next(word for word in (f"harvest{n}content" for n in range(len(text) + 1)) if word not in text)
    marks = {index: f"{word}x{index}x" for index, message in enumerate(messages) if message["content"]}
    try:
        marked = render(
            [{**message, "content": marks.get(index, "")} for index, message in enumerate(messages)],
        )
    except Exception as error:  # a template is a program: it may raise whatever it likes
        raise RolesError(f"the chat template looks into contents: {type(error).__name__}: {error}") from error
    for index, mark in marks.items():
        if marked.count(mark) != 1:
            raise RolesError(f"the chat template prints the content of message {index} {marked.count(mark)} times")
    order = sorted(marks, key=lambda index: marked.index(marks[index]))
    return _divide(messages, text, *_pieces(marked, [marks[index] for index in order]), order)


def _pieces(marked: str, marks: list[str]) -> tuple[str, list[str]]:
    """What stands before the first mark, and what follows each."""
    before, follows = marked, []
    for mark in reversed(marks):
        before, _, after = before.partition(mark)
        follows.append(after)
    return before, follows[::-1]


def _divide(
    messages: Sequence[dict[str, Any]], text: str, before: str, follows: list[str], order: list[int]
) -> list[Content]:
    # All ways to read the text up to some character. There is one, but for white space that could be trimmed or not.
    ways: dict[int, list[list[Content]]] = {len(before): [[]]} if text.startswith(before) else {}
    if not ways:
        raise RolesError("the chat template begins otherwise with other contents")
    for index, follow in zip(order, follows, strict=True):
        content, role = messages[index]["content"], messages[index]["role"]
        further: dict[int, list[list[Content]]] = {}
        for start, readings in ways.items():
            for found in dict.fromkeys((content, content.strip(), content.rstrip(), content.lstrip())):
                stop = start + len(found)
                if text.startswith(found, start) and text.startswith(follow, stop):
                    contents = [[*reading, Content(start=start, stop=stop, role=role)] for reading in readings]
                    # Two are enough to know that it is not one.
                    further[stop + len(follow)] = [*further.get(stop + len(follow), []), *contents][:2]
        if not further:
            raise RolesError(f"the chat template prints another text than the content of message {index}")
        ways = further
    readings = ways.get(len(text), [])
    if len(readings) != 1:
        raise RolesError(
            "white space of a content could be the template's as well"
            if readings
            else "the chat template ends otherwise with other contents"
        )
    return readings[0]


def tokens_of_roles(
    offsets: NDArray[np.integer[Any]], text: str, contents: Sequence[Content], roles: Collection[str]
) -> NDArray[np.bool_]:
    """Which tokens belong to one of `roles`.

    Args:
        offsets: [S, 2] characters start..stop-1 of `text` that each token covers.
        text: the rendered messages.
        contents: of `find_contents`.
        roles: wanted ones; `TEMPLATE` wants all tokens that belong to no message.

    Returns:
        [S] bool.
    """
    place = np.arange(len(text) + 1)
    is_space = np.array([character.isspace() for character in text] + [False], np.bool_)
    # For each character the next that is no white space, and the end of the last that was none.
    next_ink = np.minimum.accumulate(np.where(is_space, len(text), place)[::-1])[::-1]
    last_ink = np.concatenate([[0], np.maximum.accumulate(np.where(is_space[:-1], 0, place[1:]))])
    start, stop = np.asarray(offsets, np.int64).reshape(-1, 2).T
    inked = next_ink[start] < stop
    start, stop = np.where(inked, next_ink[start], start), np.where(inked, last_ink[stop], stop)
    starts = np.array([content.start for content in contents], np.int64)
    stops = np.array([content.stop for content in contents], np.int64)
    # A content's empty stretch (white space that was trimmed away) holds nothing.
    content = np.searchsorted(starts, start, side="right") - 1
    inside = (content >= 0) & (start < stop)
    inside[inside] = stop[inside] <= stops[content[inside]]
    wanted = np.full(len(start), TEMPLATE in roles)
    of_role = np.array([each.role in roles for each in contents], np.bool_)
    wanted[inside] = of_role[content[inside]]
    return wanted


def as_spans(kept: NDArray[np.bool_]) -> list[int]:
    """Runs of True as begin, end, begin, end, ... (each end exclusive)."""
    padded = np.concatenate([[False], kept, [False]])
    spans: list[int] = np.flatnonzero(padded[1:] != padded[:-1]).tolist()
    return spans
