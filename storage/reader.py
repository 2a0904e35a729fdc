"""Reads a run as numpy arrays, straight from the shard files, finished or not.

Rows of committed units are visible, others are an error. Uncompressed chunks that lie one after the other come with
one `preadv`; opening lists no folder. Threads may share a reader, and forked processes may go on
with it: it has no event loop, no file position, and holds no lock while reading.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numcodecs.zstd import Zstd

from storage.checksum import crc32c
from storage.errors import DamagedError, NotCommittedError, StorageError, reading
from storage.files import pread_into
from storage.format import ArraySpec, LocationSpec, StoreLayout
from storage.ledger import LedgerState, read_ledger
from storage.plan_files import SPANS_FIELD
from storage.receipt import UnitReceipt
from storage.receipts_file import read_receipt
from storage.run_folder import RunFolder
from storage.shard import MISSING

_OPEN_SHARDS = 64


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One invoke as stored: `token_ids`, `positions` int32 [n], `rows` by location name, [n, width] each.

    `key` is the user's id. `prompt_token_ids` is the whole prompt as planned, whatever rows were selected.
    """

    invoke: int
    key: str | None
    unit: int
    row_start: int
    n_prompt_tokens: int
    token_ids: np.ndarray[Any, Any]
    positions: np.ndarray[Any, Any]
    prompt_token_ids: np.ndarray[Any, Any]
    row_spans: np.ndarray[Any, Any] | None
    """[n, 2] first token and end of the prompt's stretches that may have rows; None: the whole prompt."""
    logprobs: np.ndarray[Any, Any] | None
    """float32 [n], log-probability of each row's token, NaN in the prompt; None: the run has none."""
    rows: dict[str, Any]


class StoreReader:
    """A run opened for reading. `refresh` takes in what was committed since."""

    def __init__(self, run: RunFolder | Path | str) -> None:
        self.run = run if isinstance(run, RunFolder) else RunFolder.open(run)
        self.layout: StoreLayout = self.run.layout
        self._state: LedgerState = read_ledger(self.run.ledger)
        self._shards: OrderedDict[tuple[str, int], _Shard] = OrderedDict()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process sees the same units, whatever was committed since.
        return _reopened, (type(self), self.run.path, self._state)

    @property
    def locations(self) -> tuple[LocationSpec, ...]:
        """The locations of the run."""
        return self.layout.locations

    @property
    def committed(self) -> set[int]:
        """Numbers of the committed units."""
        return set(self._state.units)

    @property
    def complete(self) -> bool:
        """Whether the run is finalised."""
        return self._state.complete is not None

    def refresh(self) -> None:
        """Read the ledger again."""
        self._state = read_ledger(self.run.ledger)

    def receipt(self, unit: int) -> UnitReceipt:
        """The receipt of a committed unit."""
        self._require(unit)
        return read_receipt(self.run, self._state.units[unit])

    def stored_rows(self, unit: int) -> int:
        """Rows that a committed unit holds."""
        self._require(unit)
        return self._state.units[unit].rows

    @property
    def commit_order(self) -> list[int]:
        """The committed units in the order in which they were committed."""
        return list(self._state.units)

    def location(self, name: str) -> LocationSpec:
        """A location by array name, alias or path."""
        for location in self.layout.locations:
            if name in (location.name, location.alias, location.path):
                return location
        known = ", ".join(location.name for location in self.layout.locations)
        raise StorageError(f"The run has no location {name!r}; it has {known}.")

    def rows(self, location: str, rows: slice | range | int) -> np.ndarray[Any, Any]:
        """Rows of a location, [n, width] in the stored dtype; `rows` counts over the whole store, holes read as zero.

        Raises `NotCommittedError` where a unit in between is not committed.
        """
        return self.array(self.location(location).array, rows)

    def array(self, path: str, rows: slice | range | int) -> np.ndarray[Any, Any]:
        """Rows of any array of the store (`tokens/id`, …), [n, width] or [n]."""
        spec = self.layout.array(path)
        start, stop, step = self._bounds(rows)
        out = np.empty((stop - start, *spec.shape[1:]), spec.native)
        self.read_into(path, start, out)
        return out[::step] if step != 1 else out

    def read_into(self, path: str, start: int, out: np.ndarray[Any, Any]) -> None:
        """Fill `out` (C-contiguous, of the array's dtype) with consecutive rows from `start` on."""
        spec = self.layout.array(path)
        target = out.reshape(len(out), spec.width).view(np.uint8)
        done = 0
        while done < len(target):
            shard, first = divmod(start + done, self.layout.rows_per_shard)
            self._require(shard // self.layout.shards_per_unit)
            n = min(self.layout.rows_per_shard - first, len(target) - done)
            self._shard(spec, shard).read(first, target[done : done + n])
            done += n

    def prompt(self, invoke: int) -> Prompt:
        """One invoke with its stored rows at every location."""
        unit = self.unit_of(invoke)
        self._require(unit)
        table = self.run.plan.read_unit(unit)
        at = table.column("invoke").to_pylist().index(invoke)
        planned = table.slice(at, 1).to_pydict()
        row_start, reserved = planned["row_start"][0], planned["n_rows"][0]
        n = int(np.count_nonzero(self.array("tokens/invoke", slice(row_start, row_start + reserved)) == invoke))
        where = slice(row_start, row_start + n)
        spans = planned.get(SPANS_FIELD.name)
        return Prompt(
            invoke=invoke,
            key=planned["key"][0],
            unit=unit,
            row_start=row_start,
            n_prompt_tokens=planned["n_prompt_tokens"][0],
            token_ids=self.array("tokens/id", where),
            positions=self.array("tokens/position", where),
            prompt_token_ids=np.array(planned["token_ids"][0], np.int32),
            row_spans=None if spans is None else np.array(spans[0], np.int32).reshape(-1, 2),
            logprobs=self.array("tokens/logprob", where) if self.layout.logprobs else None,
            rows={location.name: self.array(location.array, where) for location in self.layout.locations},
        )

    def unit_of(self, invoke: int) -> int:
        """The unit of an invoke; `StorageError` where it was skipped or does not exist."""
        invokes, units = self._unit_by_invoke
        at = int(np.searchsorted(invokes, invoke))
        if at < len(invokes) and invokes[at] == invoke:
            return int(units[at])
        if 0 <= invoke < self.layout.n_invokes:
            raise StorageError(f"Invoke {invoke} was skipped: the run has no rows of it (see plan/skipped.parquet).")
        raise StorageError(f"There is no invoke {invoke}: the run has invokes 0 to {self.layout.n_invokes - 1}.")

    def close(self) -> None:
        """Close the shard files; reading again opens them again."""
        self._shards.clear()
        self.run.plan.close()

    @cached_property
    def _unit_by_invoke(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        plan = self.run.plan.summary()
        invokes = plan.column("invoke").to_numpy()
        order = np.argsort(invokes, kind="stable")
        return invokes[order], plan.column("unit").to_numpy()[order]

    def _require(self, unit: int) -> None:
        if unit not in self._state.units:
            self.layout.shards_of(unit)
            raise NotCommittedError(f"Unit {unit} of {self.run.path} is not committed; its rows do not exist yet.")

    def _bounds(self, rows: slice | range | int) -> tuple[int, int, int]:
        if isinstance(rows, int):
            rows = range(rows, rows + 1)
        start, stop, step = (
            rows.indices(self.layout.n_rows) if isinstance(rows, slice) else (rows.start, rows.stop, rows.step)
        )
        if step < 1:
            raise StorageError("Rows are read forwards: use a step of at least 1.")
        if start < 0 or stop > self.layout.n_rows:
            raise StorageError(f"Rows {start} to {stop - 1} are outside the store's 0 to {self.layout.n_rows - 1}.")
        return start, max(start, stop), step

    def _shard(self, spec: ArraySpec, number: int) -> _Shard:
        key = (spec.path, number)
        with self._lock:
            shard = self._shards.pop(key, None)
            if shard is None:
                shard = _Shard(self.run.data / spec.file(number), spec)
                while len(self._shards) >= _OPEN_SHARDS:
                    self._shards.popitem(last=False)  # closed when the last thread that reads from it lets go
            self._shards[key] = shard
            return shard


def _reopened(kind: type[StoreReader], path: Path, state: LedgerState) -> StoreReader:
    reader = kind(path)
    reader._state = state
    return reader


class _Shard:
    """One open shard file with its index."""

    def __init__(self, path: Path, spec: ArraySpec) -> None:
        assert spec.shards is not None
        self.path = path
        self._chunk_rows = spec.chunks[0]
        self._row = np.full(spec.width, spec.fill, spec.native).view(np.uint8)
        self._row_bytes = spec.row_bytes
        self._codec = Zstd(level=1) if spec.compression == "zstd" else None
        n_chunks = spec.shards[0] // spec.chunks[0]
        raw = np.empty(16 * n_chunks + 4, np.uint8)
        with reading(path):
            try:
                self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                raise DamagedError(f"{path} is missing though its unit is committed. Run `harvest verify`.") from None
            weakref.finalize(self, os.close, self._fd)
            size = os.fstat(self._fd).st_size
            read = pread_into(self._fd, raw, size - len(raw)) if size >= len(raw) else 0
        if read < len(raw) or crc32c(raw[:-4]) != int.from_bytes(raw[-4:].tobytes(), "little"):
            raise DamagedError(f"{path} is truncated or its index is damaged. Run `harvest verify`.")
        self._index = raw[:-4].view("<u8").reshape(n_chunks, 2)

    def read(self, row: int, out: np.ndarray[Any, Any]) -> None:
        """Fill `out` (uint8 [n, row_bytes]) with rows of the shard from `row` on."""
        with reading(self.path):
            self._read(row, out)

    def _read(self, row: int, out: np.ndarray[Any, Any]) -> None:
        done = 0
        while done < len(out):
            chunk, first = divmod(row + done, self._chunk_rows)
            offset = int(self._index[chunk, 0])
            if offset == MISSING:
                n = min(self._chunk_rows - first, len(out) - done)
                out[done : done + n] = self._row
            elif self._codec is not None:
                n = min(self._chunk_rows - first, len(out) - done)
                out[done : done + n] = self._decode(chunk)[first : first + n]
            else:
                n = min(self._run_of(chunk) * self._chunk_rows - first, len(out) - done)
                block = out[done : done + n]
                if pread_into(self._fd, block, offset + first * self._row_bytes) != block.nbytes:
                    raise DamagedError(f"{self.path} is truncated. Run `harvest verify`.")
            done += n

    @cached_property
    def _runs(self) -> np.ndarray[Any, Any]:
        """For each chunk the end of the run of chunks that follow it in the file without a gap."""
        offsets, lengths = self._index[:, 0], self._index[:, 1]
        breaks = np.flatnonzero(offsets[1:] != offsets[:-1] + lengths[:-1]) + 1
        ends = np.append(breaks, len(offsets))
        return ends[np.searchsorted(breaks, np.arange(len(offsets)), side="right")]

    def _run_of(self, chunk: int) -> int:
        return int(self._runs[chunk]) - chunk

    def _decode(self, chunk: int) -> np.ndarray[Any, Any]:
        assert self._codec is not None
        offset, length = self._index[chunk].tolist()
        stored = np.empty(length, np.uint8)
        try:
            if pread_into(self._fd, stored, offset) != length:
                raise DamagedError(f"{self.path} is truncated. Run `harvest verify`.")
            raw = np.frombuffer(self._codec.decode(stored), np.uint8)
            return raw.reshape(self._chunk_rows, self._row_bytes)
        except (RuntimeError, ValueError) as error:
            raise DamagedError(
                f"Chunk {chunk} of {self.path} cannot be decoded ({error}). Run `harvest verify`."
            ) from error
