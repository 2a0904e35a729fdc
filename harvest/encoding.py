"""Records to invokes: token ids of legal length, or the reason why a record gets none.

Ids of invokes: a record's number, or, for the later parts of a prompt that was split, `part << PART_SHIFT | record`.
So an id never depends on other records, sorting by id puts the records first, and an unsplit dataset has its record
numbers. The parts of a record share its key.

Pure: no processes, no policy about what is refused; the same in this process and in tokenising processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import pyarrow as pa

from harvest.chat_roles import as_spans
from harvest.dataset import Problem, RecordBatch
from harvest.dataset_checks import Bad, Kind
from harvest.tokenizer import EncodedRoles, Tokenizer, TokenizerInfo, TokenizerSource
from storage.plan_files import SPANS_FIELD

PART_SHIFT = 40

INVOKES_SCHEMA = pa.schema(
    [
        pa.field("invoke", pa.int64(), nullable=False),
        pa.field("key", pa.string()),
        pa.field("token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("n_prompt_tokens", pa.int32(), nullable=False),
        pa.field("truncated", pa.bool_(), nullable=False),
    ]
)


def record_of(invoke: int) -> int:
    """The number of the dataset record that an invoke comes from."""
    return invoke & ((1 << PART_SHIFT) - 1)


def part_of(invoke: int) -> int:
    """Which part of its record an invoke is; 0 for the first or only one."""
    return invoke >> PART_SHIFT


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderSettings:
    """What turns records into token ids."""

    tokenizer: TokenizerSource
    kind: Kind
    add_special_tokens: bool
    add_generation_prompt: bool
    overlong: Literal["refuse", "truncate", "split", "skip"]
    max_prompt_tokens: int
    n_vocabulary: int | None
    """Ids the model knows; None means those of the tokenizer."""
    roles: tuple[str, ...] = ()
    """Chat messages: only tokens of these roles may have rows; empty means all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizedBatch:
    """Consecutive records as invokes."""

    invokes: pa.RecordBatch
    """`INVOKES_SCHEMA`: invoke int64, key string or null, token_ids list of int32, n_prompt_tokens int32, truncated
    bool; with roles also row_spans. In order of records and parts."""
    skipped: tuple[Problem, ...]
    """Records without an invoke, in order."""
    n_records: int
    roles: frozenset[str] = frozenset()
    """Roles of the records' messages, where rows go by roles."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Encoded:
    """Token ids of a record, each of which may have a row."""

    token_ids: list[int]


class Encoder:
    """Turns batches of records into batches of invokes."""

    def __init__(self, settings: EncoderSettings) -> None:
        self._settings = settings
        self._tokenizer = Tokenizer(
            settings.tokenizer, for_messages=settings.kind == "messages", for_roles=bool(settings.roles)
        )
        self.info: TokenizerInfo = self._tokenizer.info
        self._repeats_bos = self.info.adds_bos and (
            settings.kind == "messages" or (settings.kind == "text" and settings.add_special_tokens)
        )
        self._n_vocabulary = settings.n_vocabulary or self.info.n_tokens

    def encode(self, batch: RecordBatch) -> TokenizedBatch:
        """Invokes of a batch; overlong prompts are cut, split or listed."""
        invokes: list[int] = []
        keys: list[str | None] = []
        prompts: list[list[int]] = []
        truncated: list[bool] = []
        spans: list[list[int]] = []
        roles: frozenset[str] = frozenset()
        problems = list(batch.problems)
        records = batch.table.column("invoke").to_pylist()
        record_keys = batch.table.column("key").to_pylist()
        for record, key, encoded in zip(records, record_keys, self._encoded(batch), strict=True):
            if isinstance(encoded, EncodedRoles):
                roles |= encoded.roles
            found = encoded if isinstance(encoded, Bad) else self._check(encoded.token_ids)
            if isinstance(found, Bad):
                problems.append(Problem(invoke=record, key=key, reason=found.reason, detail=found.detail))
                continue
            for part, (prefix, start) in enumerate(self._cuts(found)):
                stop = start + self._settings.max_prompt_tokens - prefix
                piece = found[:prefix] + found[start:stop]
                invokes.append(part << PART_SHIFT | record)
                keys.append(key)
                prompts.append(piece)
                truncated.append(self._settings.overlong == "truncate" and len(piece) < len(found))
                if isinstance(encoded, EncodedRoles):
                    spans.append(as_spans(np.concatenate([encoded.kept[:prefix], encoded.kept[start:stop]])))
        columns = [
            pa.array(invokes, pa.int64()),
            pa.array(keys, pa.string()),
            pa.array(prompts, pa.list_(pa.int32())),
            pa.array([len(prompt) for prompt in prompts], pa.int32()),
            pa.array(truncated, pa.bool_()),
        ]
        schema = INVOKES_SCHEMA
        if self._settings.roles:
            columns.append(pa.array(spans, SPANS_FIELD.type))
            schema = schema.append(SPANS_FIELD)
        problems.sort(key=lambda problem: problem.invoke)
        return TokenizedBatch(
            invokes=pa.record_batch(columns, schema=schema),
            skipped=tuple(problems),
            n_records=batch.n_records,
            roles=roles,
        )

    def close(self) -> None:
        """Nothing to end here; a tokenising process has."""

    def _encoded(self, batch: RecordBatch) -> Sequence[_Encoded | EncodedRoles | Bad]:
        settings = self._settings
        if settings.roles:
            conversations: list[str] = batch.table.column("messages").to_pylist()
            return self._tokenizer.encode_roles(
                conversations, add_generation_prompt=settings.add_generation_prompt, roles=settings.roles
            )
        return [ids if isinstance(ids, Bad) else _Encoded(token_ids=ids) for ids in self._token_ids(batch)]

    def _token_ids(self, batch: RecordBatch) -> list[list[int] | Bad]:
        settings = self._settings
        values: list[Any] = batch.table.column(settings.kind).to_pylist()
        match settings.kind:
            case "text":
                return cast(
                    "list[list[int] | Bad]",
                    self._tokenizer.encode_texts(values, add_special_tokens=settings.add_special_tokens),
                )
            case "messages":
                return self._tokenizer.encode_messages(values, add_generation_prompt=settings.add_generation_prompt)
            case "tokens":
                return values

    def _check(self, ids: list[int]) -> list[int] | Bad:
        if not ids:
            return Bad(reason="no_tokens", detail="the tokenizer makes no token of it")
        if min(ids) < 0 or max(ids) >= self._n_vocabulary:
            array = np.asarray(ids)
            index = int(np.flatnonzero((array < 0) | (array >= self._n_vocabulary))[0])
            detail = f"token {index} has the id {ids[index]}; the model's vocabulary is 0..{self._n_vocabulary - 1}"
            return Bad(reason="bad_tokens", detail=detail)
        most = self._settings.max_prompt_tokens
        if len(ids) > most and self._settings.overlong in ("refuse", "skip"):
            return Bad(reason="overlong", detail=f"{len(ids)} tokens; at most {most} fit")
        return ids

    def _cuts(self, ids: list[int]) -> Iterator[tuple[int, int]]:
        """For each part of a prompt: how many of its first tokens (BOS) are put in front, and where it goes on."""
        most = self._settings.max_prompt_tokens
        yield 0, 0
        if self._settings.overlong != "split":
            return
        prefix = 1 if self._repeats_bos and ids[0] == self.info.bos_id and most > 1 else 0
        yield from ((prefix, start) for start in range(most, len(ids), most - prefix))
