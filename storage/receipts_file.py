"""Reads receipts of committed units back from `receipts.jsonl`, each checked against the ledger's digest."""

from __future__ import annotations

import json
from typing import Any

from storage.errors import DamagedError
from storage.files import digest
from storage.ledger import CommittedUnit
from storage.receipt import UnitReceipt
from storage.run_folder import RunFolder


def read_receipt(run: RunFolder, unit: CommittedUnit) -> UnitReceipt:
    """The receipt of a committed unit; `DamagedError` where it is not the one that was committed."""
    return UnitReceipt.from_json(read_content(run, unit))


def read_content(run: RunFolder, unit: CommittedUnit) -> dict[str, Any]:
    """The same as plain JSON values, without decoding the checksums of every chunk."""
    try:
        with run.receipts.open("rb") as file:
            file.seek(unit.receipt_offset)
            line = file.read(unit.receipt_bytes)
    except FileNotFoundError:
        raise DamagedError(
            f"{run.receipts} is missing; the digests of committed units are lost. Restore it from a copy."
        ) from None
    except OSError as error:
        raise DamagedError(f"{run.receipts} cannot be read: {error.strerror or error}.") from error
    if digest(line) != unit.receipt_digest:
        raise DamagedError(f"The receipt of unit {unit.unit} in {run.receipts} is damaged. Restore it from a copy.")
    content: dict[str, Any] = json.loads(line)
    return content
