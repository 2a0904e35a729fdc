"""The invokes of a plan: a dataset's records as token ids, with the rows that the selection gives each.

Invokes without a row are listed as skipped, never planned.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from actors.selection import Selection, SelectionError
from harvest.chat_roles import TEMPLATE
from harvest.config import RunConfig
from harvest.dataset import Dataset, Problem
from harvest.encoding import part_of, record_of
from harvest.errors import ConfigError, PlanError
from harvest.token_spill import TokenSpill
from harvest.tokenization import tokenize
from harvest.tokenizer import TokenizerInfo, TokenizerSource


@dataclass(frozen=True, kw_only=True, slots=True)
class Invokes:
    """All invokes of a dataset, in the order of its records. P is their number."""

    ids: NDArray[np.int64]
    keys: list[str | None]
    truncated: NDArray[np.bool_]
    n_prompt: NDArray[np.int64]
    n_rows: NDArray[np.int64]
    spilled: NDArray[np.int64]
    """[P] index of each in the token spill, which also holds invokes without rows."""
    spans: pa.ListArray | None
    """[P] `row_spans` of each, where rows go by roles."""
    skipped: list[Problem]
    n_ids: int
    """Invoke ids are 0..n_ids-1, those of skipped records included."""


def make_selection(config: RunConfig, tokenizer: TokenizerInfo) -> Selection:
    """The run's row selection; `ConfigError` where it cannot be placed."""
    rows, generation = config.capture.rows, config.capture.generation
    try:
        return rows.selection(generation, seed=config.seed, special_ids=tokenizer.special_ids)
    except SelectionError as error:
        raise ConfigError(f"capture.rows: {error}") from error


def read_invokes(
    config: RunConfig,
    model: str,
    revision: str | None,
    dataset: Dataset,
    max_length: int,
    n_vocabulary: int | None,
    spill: TokenSpill,
) -> tuple[Invokes, Selection]:
    """Tokenise the dataset and count the rows of each invoke.

    Args:
        config: of the run.
        model: its resolved name or folder.
        revision: of a Hugging Face id.
        dataset: the records.
        max_length: tokens of a sequence, generated ones included.
        n_vocabulary: ids that the model knows, None where that is not known.
        spill: takes the token ids of all invokes.

    Raises:
        HarvestError: a record, tokenizer or selection that cannot be used, or not one row.
    """
    max_tokens = config.capture.generation.max_tokens
    source = TokenizerSource(
        name=config.model.tokenizer or model,
        revision=revision if config.model.tokenizer is None else None,
        trust_remote_code=config.model.trust_remote_code,
    )
    ids: list[int] = []
    keys: list[str | None] = []
    truncated: list[bool] = []
    dropped: list[int] = []
    spans: list[pa.ListArray] = []
    seen_roles: frozenset[str] = frozenset()
    skipped: list[Problem] = []
    n_records = 0
    with tokenize(
        dataset,
        source,
        config.tokenization,
        max_length=max_length,
        max_tokens=max_tokens,
        n_vocabulary=n_vocabulary,
        roles=config.capture.rows.roles or (),
    ) as batches:
        selection = make_selection(config, batches.tokenizer)
        for batch in batches:
            table = batch.invokes
            tokens = table.column("token_ids")
            lengths = np.diff(tokens.offsets.to_numpy())
            spill.append(lengths, tokens.flatten().to_numpy())
            ids += table.column("invoke").to_pylist()
            keys += table.column("key").to_pylist()
            truncated += table.column("truncated").to_pylist()
            if selection.roles:
                spans.append(table.column("row_spans"))
                seen_roles |= batch.roles
            if selection.drops_prompt_tokens:
                own_spans = spans[-1].to_pylist() if selection.roles else [None] * len(tokens)
                dropped += [
                    selection.count_dropped(len(prompt), prompt, own)
                    for prompt, own in zip(tokens.to_pylist(), own_spans, strict=True)
                ]
            skipped += batch.skipped
            n_records += batch.n_records
    n_prompt = spill.close_writing()
    _refuse_unknown_roles(selection, seen_roles)
    n_rows = selection.counts(n_prompt, max_tokens, dropped if dropped else 0)
    numbered, named, n_ids = _number_parts(np.array(ids, np.int64), keys, n_records)
    kept = np.flatnonzero(n_rows)
    for index in np.flatnonzero(n_rows == 0).tolist():
        skipped.append(
            Problem(
                invoke=int(numbered[index]),
                key=named[index],
                reason="no_rows",
                detail=f"capture.rows takes none of its {n_prompt[index]} tokens",
            )
        )
    if not len(kept):
        raise PlanError(
            f"none of the {len(n_rows):,} invokes has a token that the row selection takes: loosen capture.rows "
            "(roles, skip_first, start, stop)"
        )
    invokes = Invokes(
        ids=numbered[kept],
        keys=[named[index] for index in kept.tolist()],
        truncated=np.array(truncated, np.bool_)[kept],
        n_prompt=n_prompt[kept],
        n_rows=n_rows[kept],
        spilled=kept,
        spans=pa.concat_arrays(spans).take(pa.array(kept)) if spans else None,
        skipped=sorted(skipped, key=lambda problem: problem.invoke),
        n_ids=n_ids,
    )
    return invokes, selection


def _refuse_unknown_roles(selection: Selection, seen: frozenset[str]) -> None:
    unknown = sorted(set(selection.roles) - seen - {TEMPLATE})
    if unknown:
        raise PlanError(
            f"capture.rows.roles: no message of the dataset has the role {', '.join(unknown)}, so there are no rows of "
            f"it; the roles are {', '.join(sorted(seen))}, and {TEMPLATE} for the chat template's own tokens"
        )


def _number_parts(
    ids: NDArray[np.int64], keys: list[str | None], n_records: int
) -> tuple[NDArray[np.int64], list[str | None], int]:
    """Dense ids: records keep their number, further parts of split prompts follow after all records, in order."""
    named = list(keys)
    numbered = ids.copy()
    n_ids = n_records
    for index, invoke in enumerate(ids.tolist()):
        if part := part_of(invoke):
            numbered[index] = n_ids
            named[index] = f"{keys[index] if keys[index] is not None else record_of(invoke)}#{part}"
            n_ids += 1
    return numbered, named, n_ids
