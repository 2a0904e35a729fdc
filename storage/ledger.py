"""The ledger: an append-only file of checksummed JSON lines, and the only truth about progress.

Each line is `{"seq": n, "group": g, …, "crc": "…"}` with the crc32c of the line's bytes before `, "crc"`. Lines of one
group are appended with one write and one fsync. A crash can therefore damage nothing but the last group; such a tail is
dropped when a driver opens the run. Damage before it is no crash and is refused, never repaired.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from storage.checksum import crc32c
from storage.errors import LedgerError, write_error, writing
from storage.files import write_all


@dataclass(frozen=True, kw_only=True, slots=True)
class CommittedUnit:
    """A committed unit: attempt, rows stored, bytes of its files, and where its receipt lies in `receipts.jsonl`."""

    unit: int
    attempt: int
    rows: int
    total_bytes: int
    receipt_offset: int
    receipt_bytes: int
    receipt_digest: str


@dataclass(frozen=True, kw_only=True)
class LedgerState:
    """What a ledger says. `valid_bytes` ends before a torn tail; `torn` is True where there is one."""

    units: dict[int, CommittedUnit] = field(default_factory=dict)
    incarnation: int = 0
    complete: dict[str, Any] | None = None
    seq: int = 0
    group: int = 0
    valid_bytes: int = 0
    torn: bool = False

    @property
    def receipts_bytes(self) -> int:
        """Bytes of `receipts.jsonl` that committed units use."""
        return max((unit.receipt_offset + unit.receipt_bytes for unit in self.units.values()), default=0)


_TAIL_BYTES = len(', "crc": "00000000"}')


def encode_line(content: dict[str, Any]) -> bytes:
    """One ledger line with its checksum."""
    body = json.dumps(content, separators=(", ", ": "))[:-1].encode()
    return body + f', "crc": "{crc32c(body):08x}"}}\n'.encode()


def decode_line(line: bytes) -> dict[str, Any] | None:
    """The content of a ledger line (without its newline), or None where it is damaged."""
    body, tail = line[:-_TAIL_BYTES], line[-_TAIL_BYTES:]
    if len(line) <= _TAIL_BYTES or tail != f', "crc": "{crc32c(body):08x}"}}'.encode():
        return None
    content: dict[str, Any] = json.loads(body + b"}")
    return content


def read_ledger(path: Path) -> LedgerState:
    """The state that the ledger at `path` records; `LedgerError` where it is missing or damaged before its last
    group.
    """
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise LedgerError(
            f"{path} is missing: nothing says which units are committed. Restore it from a copy."
        ) from None
    except OSError as error:
        raise LedgerError(
            f"{path} cannot be read: {error.strerror or error}. Nothing else says which units are committed."
        ) from error
    units: dict[int, CommittedUnit] = {}
    incarnation = seq = group = valid = position = number = 0
    complete: dict[str, Any] | None = None
    torn = False
    while position < len(raw):
        end = raw.find(b"\n", position)
        number += 1
        content = decode_line(raw[position:end]) if end >= 0 else None
        if content is None or content["seq"] != seq + 1 or torn:
            torn = True
            if content is not None and content["group"] > group + 1:
                raise LedgerError(f"{path} is damaged before its end, near line {number}. Restore it from a copy.")
            position = end + 1 if end >= 0 else len(raw)
            continue
        seq, group = content["seq"], content["group"]
        if "open" in content:
            incarnation = content["open"]
        elif "complete" in content:
            complete = content["complete"]
        else:
            offset, size, receipt_digest = content["receipt"]
            units[content["unit"]] = CommittedUnit(
                unit=content["unit"],
                attempt=content["attempt"],
                rows=content["rows"],
                total_bytes=content["bytes"],
                receipt_offset=offset,
                receipt_bytes=size,
                receipt_digest=receipt_digest,
            )
        valid = position = end + 1
    return LedgerState(
        units=units,
        incarnation=incarnation,
        complete=complete,
        seq=seq,
        group=group,
        valid_bytes=valid,
        torn=torn,
    )


class AppendFile:
    """A file that only grows, written by one process; `end` is where the next bytes go."""

    def __init__(self, path: Path, *, keep_bytes: int) -> None:
        self.path = path
        with writing(path, "opening"):
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            size = os.fstat(self._fd).st_size
            if size < keep_bytes:
                os.close(self._fd)
                raise LedgerError(
                    f"{path} is shorter than the ledger says ({size} of {keep_bytes} bytes). Restore it from a copy."
                )
            if size > keep_bytes:
                os.ftruncate(self._fd, keep_bytes)
                os.fsync(self._fd)
            os.lseek(self._fd, keep_bytes, os.SEEK_SET)
        self.end = keep_bytes

    def append(self, data: bytes) -> None:
        """Append and make durable. After a failure the file is as it was before the call."""
        try:
            write_all(self._fd, data)
            os.fsync(self._fd)
        except OSError as error:
            self.take_back(0)
            raise write_error(error, self.path, "appending to") from error
        self.end += len(data)

    def take_back(self, n_bytes: int) -> None:
        """Cut off the last `n_bytes` that were appended, and whatever a failed append left behind them."""
        with writing(self.path, "shortening"):
            self.end -= n_bytes
            os.ftruncate(self._fd, self.end)
            os.lseek(self._fd, self.end, os.SEEK_SET)

    def close(self) -> None:
        """Close the file; harmless when closed."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class LedgerWriter:
    """Appends groups of lines to the ledger."""

    def __init__(self, path: Path, state: LedgerState) -> None:
        self._file = AppendFile(path, keep_bytes=state.valid_bytes)
        self._seq = state.seq
        self._group = state.group

    def append(self, lines: Sequence[dict[str, Any]]) -> None:
        """Append `lines` as one group, durable on return."""
        group = self._group + 1
        data = b"".join(
            encode_line({"seq": self._seq + i, "group": group, **line}) for i, line in enumerate(lines, start=1)
        )
        self._file.append(data)
        self._seq += len(lines)
        self._group = group

    def close(self) -> None:
        """Close the ledger."""
        self._file.close()
