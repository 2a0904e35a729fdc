"""The receipt of a finished attempt: what its files hold, never the rows themselves.

A receipt is a plain value: it pickles, and `to_json`/`from_json` are exact. The ranks of a tensor-parallel engine write
different arrays of one attempt; their receipts merge into the unit's.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from storage.checksum import crc32c, mask_crc32c
from storage.errors import ReceiptError
from storage.format import STATUSES
from storage.stats import LocationStatistics


@dataclass(frozen=True, kw_only=True, slots=True)
class FileReceipt:
    """One shard file: array path, shard number, file bytes, rows, checksums.

    `chunk_crcs` is the crc32c of each inner chunk as stored, None for an absent one; `index_crc` that of the shard's
    index; `mask_crc` that of the written rows as bits (first row in the highest bit).
    """

    array: str
    shard: int
    file_bytes: int
    rows: int
    chunk_crcs: tuple[int | None, ...]
    index_crc: int
    mask_crc: int

    @property
    def digest(self) -> str:
        """crc32c over the present chunks' checksums and the index's, as 8 hex digits: one value for the whole file."""
        present = [crc for crc in self.chunk_crcs if crc is not None]
        return f"{crc32c(struct.pack(f'<{len(present) + 1}I', *present, self.index_crc)):08x}"

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; checksums are 8 hex digits each, dashes for an absent chunk."""
        return {
            "array": self.array,
            "shard": self.shard,
            "bytes": self.file_bytes,
            "rows": self.rows,
            "digest": self.digest,
            "chunks": "".join("--------" if crc is None else f"{crc:08x}" for crc in self.chunk_crcs),
            "index": f"{self.index_crc:08x}",
            "mask": f"{self.mask_crc:08x}",
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> FileReceipt:
        """What `to_json` wrote."""
        chunks = content["chunks"]
        words = [chunks[i : i + 8] for i in range(0, len(chunks), 8)]
        return cls(
            array=content["array"],
            shard=content["shard"],
            file_bytes=content["bytes"],
            rows=content["rows"],
            chunk_crcs=tuple(None if word == "--------" else int(word, 16) for word in words),
            index_crc=int(content["index"], 16),
            mask_crc=int(content["mask"], 16),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class InvokeReceipt:
    """How one invoke ended: the rows really stored and a status of `STATUSES`; `reason` where it is not "ok"."""

    invoke: int
    n_rows: int
    status: str = "ok"
    reason: str = ""

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ReceiptError(f"Invoke {self.invoke}: status {self.status!r} is none of {', '.join(STATUSES)}.")
        if self.n_rows < 0:
            raise ReceiptError(f"Invoke {self.invoke} reports {self.n_rows} rows.")


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitReceipt:
    """What one attempt at a unit wrote: files, how each invoke ended, statistics by location name, timings in
    seconds.
    """

    unit: int
    attempt: int
    files: tuple[FileReceipt, ...]
    invokes: tuple[InvokeReceipt, ...] = ()
    statistics: dict[str, LocationStatistics] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.file_bytes for file in self.files)

    @property
    def rows(self) -> int:
        """Rows stored in every array (the arrays agree, or `Committer.publish` refuses)."""
        by_array: dict[str, int] = {}
        for file in self.files:
            by_array[file.array] = by_array.get(file.array, 0) + file.rows
        return max(by_array.values(), default=0)

    @classmethod
    def merge(
        cls, receipts: Sequence[UnitReceipt], *, invokes: Iterable[InvokeReceipt | tuple[int, int, str]] | None = None
    ) -> UnitReceipt:
        """The receipt of an attempt from those of its ranks, in any order.

        `invokes` replaces what the ranks say of invokes; without it one rank's word is taken, and two that differ are
        an error, as are receipts of different attempts and files that occur twice.
        """
        if not receipts:
            raise ReceiptError("No receipt to merge.")
        first = receipts[0]
        if any((other.unit, other.attempt) != (first.unit, first.attempt) for other in receipts):
            raise ReceiptError("Receipts of different units or attempts cannot be merged.")
        files = sorted((file for receipt in receipts for file in receipt.files), key=lambda x: (x.array, x.shard))
        names = [(file.array, file.shard) for file in files]
        if len(set(names)) != len(names):
            raise ReceiptError(f"Unit {first.unit}: two ranks report the same file.")
        if invokes is None:
            told = {receipt.invokes for receipt in receipts if receipt.invokes}
            if len(told) > 1:
                raise ReceiptError(f"Unit {first.unit}: ranks disagree on how its invokes ended.")
            ended = told.pop() if told else ()
        else:
            ended = as_invoke_receipts(invokes)
        statistics = {name: value for receipt in receipts for name, value in receipt.statistics.items()}
        timings = {
            name: max(receipt.timings.get(name, 0.0) for receipt in receipts)
            for receipt in receipts
            for name in receipt.timings
        }
        return replace(first, files=tuple(files), invokes=ended, statistics=statistics, timings=timings)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; `from_json` reverses it."""
        return {
            "unit": self.unit,
            "attempt": self.attempt,
            "files": [file.to_json() for file in self.files],
            "invokes": [
                [x.invoke, x.n_rows, x.status, x.reason] if x.reason else [x.invoke, x.n_rows, x.status]
                for x in self.invokes
            ],
            "statistics": {name: value.to_json() for name, value in self.statistics.items()},
            "timings": self.timings,
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> UnitReceipt:
        """What `to_json` wrote."""
        return cls(
            unit=content["unit"],
            attempt=content["attempt"],
            files=tuple(FileReceipt.from_json(file) for file in content["files"]),
            invokes=as_invoke_receipts(content["invokes"]),
            statistics={name: LocationStatistics.from_json(x) for name, x in content["statistics"].items()},
            timings=dict(content["timings"]),
        )


def as_invoke_receipts(
    invokes: Iterable[InvokeReceipt | tuple[int, int, str] | Sequence[Any]],
) -> tuple[InvokeReceipt, ...]:
    """Invoke receipts from (invoke, n_rows, status[, reason]) tuples or receipts, in order of their rows' invokes."""
    receipts = []
    for item in invokes:
        if not isinstance(item, InvokeReceipt):
            invoke, n_rows, status, *reason = item
            item = InvokeReceipt(
                invoke=int(invoke), n_rows=int(n_rows), status=str(status), reason=str(reason[0]) if reason else ""
            )
        receipts.append(item)
    return tuple(receipts)


def expected_mask_crcs(
    *, n_shards: int, rows_per_shard: int, starts: Sequence[int], counts: Sequence[int]
) -> list[int]:
    """Mask checksum of each shard of a unit whose invokes begin at unit rows `starts` and store `counts` rows."""
    mask = np.zeros(n_shards * rows_per_shard, np.bool_)
    for start, count in zip(starts, counts, strict=True):
        mask[start : start + count] = True
    return [mask_crc32c(part) for part in mask.reshape(n_shards, rows_per_shard)]
