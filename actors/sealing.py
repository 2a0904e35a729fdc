"""Seals an attempt's staged files with what became of its invokes. Under tensor parallelism each rank seals its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from actors.logprobs import write_logprobs
from actors.protocol import InvokeOutcome


def seal_unit(writer: Any, outcomes: Sequence[InvokeOutcome], *, has_labels: bool = True) -> Any:
    """Seal a `storage.unit_writer.UnitWriter`; its receipt.

    Args:
        writer: of the attempt, on this rank.
        outcomes: how each invoke of the unit ended.
        has_labels: this rank writes `tokens/*`, and so it also says how the invokes ended.

    Raises:
        MissingLogprobs: the store has log-probabilities, an invoke none.
        RowError: an array has other rows than the outcomes promise.
    """
    if has_labels and writer.layout.logprobs:
        write_logprobs(writer, outcomes)
    return writer.seal(
        expected_rows=sum(outcome.n_rows for outcome in outcomes),
        invokes=[(outcome.invoke, outcome.n_rows, outcome.status) for outcome in outcomes] if has_labels else (),
    )
