"""Checks the plan's own arithmetic, and a unit's labels against the plan and its receipt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from storage.format import StoreLayout
from storage.plan_files import SPANS_FIELD
from storage.receipt import UnitReceipt

_Labels = dict[str, "np.ndarray[Any, Any]"]


def plan_problems(layout: StoreLayout, plan: pa.Table, skipped: pa.Table) -> Iterator[str]:
    """What contradicts itself in a plan (`PlanReader.summary` and `.skipped`), one sentence each."""
    invokes = plan.column("invoke").to_numpy()
    everyone = np.concatenate([invokes, skipped.column("invoke").to_numpy()])
    if len(everyone) != layout.n_invokes:
        yield f"it accounts for {len(everyone)} invokes of {layout.n_invokes}"
    if len(np.unique(everyone)) != len(everyone):
        yield "it names an invoke twice"
    units = plan.column("unit").to_numpy().astype(np.int64)
    starts = plan.column("row_start").to_numpy()
    ends = starts + plan.column("n_rows").to_numpy()
    outside = (starts < units * layout.unit_rows) | (ends > (units + 1) * layout.unit_rows)
    if outside.any():
        yield f"invoke {int(invokes[np.argmax(outside)])} has rows outside its unit"
    overlap = starts[1:] < ends[:-1]
    if overlap.any():
        yield f"invoke {int(invokes[1:][np.argmax(overlap)])} overlaps the invoke before it"


def label_problems(
    layout: StoreLayout, receipt: UnitReceipt, plan: dict[str, list[Any]], labels: _Labels
) -> Iterator[str]:
    """What is wrong with a unit's labels, one sentence each.

    `plan` holds the unit's columns, `labels` the unit's `tokens/*` by path, each [k x R]. Every planned invoke must own
    exactly the rows its receipt says, in rising positions, with the prompt's token ids, and inside its spans where the
    plan has any; all other rows must be holes.
    """
    first_row = layout.rows_of(receipt.unit).start
    ended = {x.invoke: x for x in receipt.invokes}
    expected = np.full(layout.unit_rows, -1, np.int64)
    owner, ids, positions = labels["tokens/invoke"], labels["tokens/id"], labels["tokens/position"]
    all_spans = plan.get(SPANS_FIELD.name, [None] * len(plan["invoke"]))
    for invoke, start, reserved, n_prompt, tokens, spans in zip(
        plan["invoke"],
        plan["row_start"],
        plan["n_rows"],
        plan["n_prompt_tokens"],
        plan["token_ids"],
        all_spans,
        strict=True,
    ):
        if invoke not in ended:
            yield f"the receipt does not say how invoke {invoke} ended"
            continue
        n = ended[invoke].n_rows
        if n > reserved:
            yield f"invoke {invoke} has {n} rows where {reserved} are planned"
        where = slice(start - first_row, start - first_row + n)
        expected[where] = invoke
        if not (owner[where] == invoke).all():
            yield f"invoke {invoke} does not own its {n} rows from row {start} on"
            continue
        at = positions[where]
        if (np.diff(at) <= 0).any():
            yield f"the positions of invoke {invoke} do not rise"
        prompt = (at >= 0) & (at < n_prompt)
        wrong = ids[where][prompt] != np.asarray(tokens, np.int32)[at[prompt]]
        if wrong.any():
            yield f"{int(wrong.sum())} token ids of invoke {invoke} are not those of its prompt"
        if layout.nan_logprobs and not _fit(labels["tokens/logprob"][where], prompt):
            yield f"the logprobs of invoke {invoke} are not those of its generated tokens alone"
        # A position is inside a span if it is past an odd number of begins and ends.
        if spans is not None and (np.searchsorted(spans, at[prompt], side="right") % 2 == 0).any():
            yield f"invoke {invoke} has rows of tokens outside its spans"
    if layout.nan_logprobs and not np.isnan(labels["tokens/logprob"][expected == -1]).all():
        yield "a row of no invoke has a logprob"
    foreign = (owner != expected) & (expected == -1)
    if foreign.any():
        row = int(np.argmax(foreign))
        yield f"row {first_row + row} carries invoke {int(owner[row])}, to which it does not belong"


def _fit(logprobs: np.ndarray[Any, Any], prompt: np.ndarray[Any, Any]) -> bool:
    # Above zero by no more than rounding.
    return bool(np.isnan(logprobs[prompt]).all() and (logprobs[~prompt] < 1e-3).all())
