"""What each committed unit added to a run: as its commit event tells, else from its receipt and the plan.

The ledger alone says what is committed. The event follows it, so a driver that is killed between the two, or a lost
`events.jsonl`, leaves units without one: they must count all the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from storage.ledger import CommittedUnit
from storage.receipt import UnitReceipt
from storage.receipts_file import read_receipt
from storage.run_folder import RunFolder


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitTotals:
    """Totals of one committed unit."""

    n_invokes: int
    n_tokens: int
    """Tokens that passed through the model; those of the prompts alone where no event tells of answers."""
    stored_bytes: int
    """Bytes of rows over all locations."""
    suspicious: tuple[str, ...]
    """Locations with non-finite or all-zero rows."""


def total_units(
    folder: RunFolder, units: Mapping[int, CommittedUnit], events: Mapping[int, Mapping[str, Any]]
) -> dict[int, UnitTotals]:
    """Totals by unit.

    Args:
        folder: of the run.
        units: the committed ones, from the ledger.
        events: commit events by unit.

    Raises:
        DamagedError: a receipt or the plan is needed and cannot be read.
    """
    return {
        number: _of_event(events[number]) if number in events else _of_receipt(folder, unit)
        for number, unit in units.items()
    }


def suspicious_rows(receipt: UnitReceipt | None) -> dict[str, str]:
    """Locations of a unit with rows that are not finite or all zero, in words: they are stored, never in silence."""
    found = {}
    for location, stats in (receipt.statistics if receipt is not None else {}).items():
        if stats.nonfinite_rows or stats.zero_rows:
            found[location] = f"{stats.nonfinite_rows} non-finite, {stats.zero_rows} all-zero of {stats.rows} rows"
    return found


def _of_event(event: Mapping[str, Any]) -> UnitTotals:
    return UnitTotals(
        n_invokes=event["n_invokes"],
        # The last generated token of an invoke is never fed back.
        n_tokens=event["n_prompt_tokens"] + event["n_generated_tokens"] - event["n_invokes"],
        stored_bytes=event["stored_bytes"],
        suspicious=tuple(event.get("suspicious", ())),
    )


def _of_receipt(folder: RunFolder, unit: CommittedUnit) -> UnitTotals:
    receipt = read_receipt(folder, unit)
    prompts = folder.plan.read_unit(unit.unit, columns=["n_prompt_tokens"]).column("n_prompt_tokens")
    return UnitTotals(
        n_invokes=len(receipt.invokes),
        n_tokens=sum(prompts.to_pylist()),
        stored_bytes=unit.rows * folder.layout.location_row_bytes,
        suspicious=tuple(suspicious_rows(receipt)),
    )
