"""Which positions of an invoke get a row: pure arithmetic, the same in the plan, the engine and the reader.

Positions are absolute in the invoke: the prompt's tokens are 0..n_prompt-1, generated tokens follow. A position has a
row only if its token is fed to the model, so a request of `max_tokens` = m has generated rows n_prompt..n_prompt+m-2:
the last token is never fed back.

Order of work: the source gives candidate positions; `skip_first` and `special_ids` drop some; `select` picks from what
is left. So `last` without special tokens is the last token that is not special, and `sample` takes as many as it is
asked for. `roles` drops like `special_ids`: which tokens of a chat belong to them is found when it is tokenised, and
comes as spans. `reduce` then makes one row of what was picked.

Invariants:

- Everything is known before the request runs: the answer is for the longest possible case, ascending, without doubles.
- A request that ends early has exactly the planned positions that it reached. What depends on where an answer ends
  (`last`, negative bounds of a `slice`) can therefore not be placed among generated tokens and is refused, unless every
  answer has the same length (`exact_length`).
- Generated tokens are unknown when rows are placed, so `special_ids` and `roles` drop prompt tokens only.
- A sample depends on (seed, invoke) alone, on every platform and NumPy version: the positions with the smallest values
  of a fixed 64-bit hash.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

Select = Literal["all", "last", "slice", "every", "sample"]
Source = Literal["prompt", "generated", "both"]
Reduce = Literal["mean", "max"]


class SelectionError(ValueError):
    """A selection that cannot be placed, with the setting to change."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """A rule that gives each invoke its row positions.

    Raises:
        SelectionError: the settings contradict each other, or place rows by where an answer ends.
    """

    select: Select = "all"
    source: Source = "prompt"
    start: int | None = None
    """`slice`: as in Python, counted over the candidates."""
    stop: int | None = None
    every: int = 1
    """`every`: candidates 0, k, 2k, ..."""
    sample: int | None = None
    """`sample`: so many candidates, or all if there are fewer."""
    skip_first: int = 0
    """Positions below this one get no row."""
    special_ids: tuple[int, ...] = ()
    """Prompt tokens with these ids get no row; empty keeps all."""
    roles: tuple[str, ...] = ()
    """Prompt tokens outside the spans that belong to these roles get no row; empty keeps all."""
    seed: int = 0
    exact_length: bool = False
    """Every answer has exactly `max_tokens` tokens: no end-of-sequence or stop string can end it sooner."""
    reduce: Reduce | None = None
    """The positions of an invoke become one row together, labelled as its last position; None: a row for each."""

    def __post_init__(self) -> None:
        if self.select not in get_args(Select):
            raise SelectionError(f'select = "{self.select}"; known: {", ".join(get_args(Select))}')
        if self.source not in get_args(Source):
            raise SelectionError(f'source = "{self.source}"; known: {", ".join(get_args(Source))}')
        if self.select != "slice" and (self.start is not None or self.stop is not None):
            raise SelectionError(f'start and stop belong to select = "slice", not to "{self.select}"')
        if self.select == "slice" and self.start is None and self.stop is None:
            raise SelectionError('select = "slice" needs start or stop; select = "all" takes everything')
        if self.every < 1 or (self.select != "every" and self.every != 1):
            raise SelectionError(
                f'every = {self.every} belongs to select = "every" and is at least 1 (select is "{self.select}")'
            )
        if self.select == "sample" and (self.sample is None or self.sample < 1):
            raise SelectionError('select = "sample" needs sample, the number of positions for each invoke')
        if self.select != "sample" and self.sample is not None:
            raise SelectionError(f'sample belongs to select = "sample", not to "{self.select}"')
        if self.skip_first < 0:
            raise SelectionError(f"skip_first = {self.skip_first} is negative")
        if self.reduce not in (None, *get_args(Reduce)):
            raise SelectionError(f'reduce = "{self.reduce}"; known: {", ".join(get_args(Reduce))}')
        if self.reduce and self.takes_generated:
            raise SelectionError(
                f'reduce = "{self.reduce}" with source = "{self.source}" would need to know where an answer ends when '
                'its one row gets its place: use source = "prompt", or store all rows and reduce when reading'
            )
        if self.roles and self.source == "generated":
            raise SelectionError('roles picks tokens of the prompt: use source = "prompt" or "both"')
        if self.takes_generated and not self.exact_length:
            self._refuse_open_end()
        object.__setattr__(self, "special_ids", tuple(sorted({int(token) for token in self.special_ids})))

    def _refuse_open_end(self) -> None:
        negative = [name for name in ("start", "stop") if (getattr(self, name) or 0) < 0]
        if self.select == "last":
            what = 'select = "last"'
        elif negative:
            what = f"a slice with a negative {' and '.join(negative)}"
        else:
            return
        raise SelectionError(
            f'{what} with source = "{self.source}" depends on where an answer ends, which is not known when rows get '
            'their places: use source = "prompt", select = "all" (and take the last row when reading), or fix the '
            "length of every answer with generation.ignore_eos = true and no stop strings"
        )

    @property
    def takes_generated(self) -> bool:
        """Some generated token may get a row."""
        return self.source != "prompt"

    @property
    def drops_prompt_tokens(self) -> bool:
        """Which rows a prompt has depends on its tokens: `count_dropped` counts."""
        return bool(self.special_ids or self.roles) and self.source != "generated"

    def positions(
        self,
        *,
        n_prompt_tokens: int,
        max_tokens: int,
        invoke: int,
        token_ids: Sequence[int] | None = None,
        spans: Sequence[int] | None = None,
    ) -> NDArray[np.int64]:
        """Planned row positions of one invoke; with `reduce`, those that its one row covers.

        Args:
            n_prompt_tokens: length of the prompt.
            max_tokens: tokens the request may generate.
            invoke: its id; chooses its sample.
            token_ids: the prompt's token ids; needed where `special_ids` is not empty, else ignored.
            spans: begin, end, begin, end, ... (ends exclusive) of the prompt's tokens that belong to `roles`; needed
                where `roles` is not empty, else ignored.

        Returns:
            [n_rows] int64, ascending; for an answer of `max_tokens` tokens. A shorter answer of n tokens has those
            below `n_prompt_tokens + n - 1`.
        """
        candidates = self._candidates(n_prompt_tokens, max_tokens, token_ids, spans)
        match self.select:
            case "all":
                return candidates
            case "last":
                return candidates[-1:]
            case "slice":
                return candidates[self.start : self.stop]
            case "every":
                return candidates[:: self.every]
            case "sample":
                assert self.sample is not None
                if len(candidates) <= self.sample:
                    return candidates
                ranks = _hash(candidates, self.seed, invoke)
                return np.sort(candidates[np.argpartition(ranks, self.sample - 1)[: self.sample]])

    def count(
        self,
        *,
        n_prompt_tokens: int,
        max_tokens: int,
        token_ids: Sequence[int] | None = None,
        spans: Sequence[int] | None = None,
    ) -> int:
        """Number of planned rows of one invoke: the length of `positions` (at most 1 with `reduce`), for less work."""
        n_dropped = self.count_dropped(n_prompt_tokens, token_ids, spans) if self.drops_prompt_tokens else 0
        return int(self.counts([n_prompt_tokens], max_tokens, [n_dropped])[0])

    def counts(
        self,
        n_prompt_tokens: NDArray[np.integer[Any]] | Sequence[int],
        max_tokens: NDArray[np.integer[Any]] | int,
        n_dropped: NDArray[np.integer[Any]] | Sequence[int] | int = 0,
    ) -> NDArray[np.int64]:
        """Numbers of planned rows of many invokes.

        Args:
            n_prompt_tokens: [n_invokes] lengths of the prompts.
            max_tokens: [n_invokes] or one number, tokens the requests may generate.
            n_dropped: [n_invokes] `count_dropped` of each prompt, where `drops_prompt_tokens`.

        Returns:
            [n_invokes] int64.
        """
        n_prompt = np.asarray(n_prompt_tokens, np.int64)
        end = n_prompt + np.maximum(np.asarray(max_tokens, np.int64) - 1, 0) if self.takes_generated else n_prompt
        begin = n_prompt if self.source == "generated" else np.zeros_like(n_prompt)
        n = np.maximum(end - np.maximum(begin, self.skip_first), 0)
        if self.drops_prompt_tokens:
            n = n - np.asarray(n_dropped, np.int64)
        n = self._picked(n)
        return np.minimum(n, 1) if self.reduce else n

    def _picked(self, n: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many of `n` candidates `select` picks."""
        match self.select:
            case "all":
                return n
            case "last":
                return np.minimum(n, 1)
            case "slice":
                return np.maximum(_bound(self.stop, n, n) - _bound(self.start, n, np.zeros_like(n)), 0)
            case "every":
                return -(-n // self.every)
            case "sample":
                assert self.sample is not None
                return np.minimum(n, self.sample)

    def count_dropped(
        self, n_prompt: int, token_ids: Sequence[int] | None = None, spans: Sequence[int] | None = None
    ) -> int:
        """Number of a prompt's tokens that `special_ids` and `roles` drop (beyond those that `skip_first` does)."""
        return int(np.count_nonzero(self._dropped(n_prompt, token_ids, spans)[self.skip_first :]))

    def _candidates(
        self, n_prompt: int, max_tokens: int, token_ids: Sequence[int] | None, spans: Sequence[int] | None
    ) -> NDArray[np.int64]:
        n_prompt_rows = 0 if self.source == "generated" else n_prompt
        begin = max(n_prompt - n_prompt_rows, self.skip_first)
        end = n_prompt + max(max_tokens - 1, 0) if self.takes_generated else n_prompt
        candidates = np.arange(begin, max(begin, end), dtype=np.int64)
        if not self.drops_prompt_tokens:
            return candidates
        kept = np.ones(len(candidates), np.bool_)
        kept[: max(n_prompt - begin, 0)] = ~self._dropped(n_prompt, token_ids, spans)[begin:]
        return candidates[kept]

    def _dropped(
        self, n_prompt: int, token_ids: Sequence[int] | None, spans: Sequence[int] | None
    ) -> NDArray[np.bool_]:
        dropped = np.zeros(n_prompt, np.bool_)
        if self.special_ids:
            if token_ids is None:
                raise ValueError("a selection that skips special tokens needs the prompt's token ids")
            if len(token_ids) != n_prompt:
                raise ValueError(f"{len(token_ids)} token ids for a prompt of {n_prompt} tokens")
            dropped |= np.isin(np.asarray(token_ids, np.int64), np.asarray(self.special_ids, np.int64))
        if self.roles:
            if spans is None:
                raise ValueError("a selection by roles needs the prompt's spans")
            kept = np.zeros(n_prompt, np.bool_)
            for begin, end in zip(spans[::2], spans[1::2], strict=True):
                kept[begin:end] = True
            dropped |= ~kept
        return dropped

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON-ready values."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Selection:
        """The inverse of `to_json`."""
        lists = {name: tuple(fields.get(name, ())) for name in ("special_ids", "roles")}
        return cls(**{**fields, **lists})


def _bound(bound: int | None, n: NDArray[np.int64], default: NDArray[np.int64]) -> NDArray[np.int64]:
    if bound is None:
        return default
    return np.minimum(bound, n) if bound >= 0 else np.maximum(n + bound, 0)


def _hash(positions: NDArray[np.int64], seed: int, invoke: int) -> NDArray[np.uint64]:
    """One 64-bit value for each position: SplitMix64's output function, a bijection, so that there are no ties."""
    key = int(_mix(_mix(np.array([seed % 2**64], np.uint64)) ^ np.array([invoke % 2**64], np.uint64))[0])
    return _mix(positions.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key))


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
