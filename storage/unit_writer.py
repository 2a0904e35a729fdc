"""Writes one attempt at a unit: rows to their planned places in staged shard files.

An attempt has a folder of its own under `.staging/`, laid out like the store, so that publishing is a rename of each
file. Attempts share nothing, hence a late one can neither damage nor mix with another. Under tensor parallelism each
rank opens a writer for the arrays it owns, in the same folder.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from storage.errors import RowError, StorageError
from storage.files import allow_open_files, make_folder
from storage.format import ArraySpec, StoreLayout
from storage.receipt import FileReceipt, InvokeReceipt, UnitReceipt, as_invoke_receipts
from storage.run_folder import RunFolder, staging_folder
from storage.shard import ShardWriter
from storage.stats import RowStatistics

_FLOAT16_MAX = 65504.0
_SEALERS = 8

__all__ = ["InvokeReceipt", "UnitReceipt", "UnitWriter", "as_stored"]


class UnitWriter:
    """Writer of attempt `attempt` at unit `unit`.

    `arrays` names the arrays this writer owns (all by default). `direct` asks for O_DIRECT for activations where it is
    possible. `write`, `clear` and `written` may be called from several threads.
    """

    def __init__(
        self,
        run: RunFolder | Path,
        layout: StoreLayout,
        *,
        unit: int,
        attempt: int,
        arrays: Sequence[str] | None = None,
        direct: bool = False,
    ) -> None:
        self.layout = layout
        self.unit = unit
        self.attempt = attempt
        self.sealed_files = 0
        """Files that `seal` has closed so far; read by other threads while it works."""
        self._sealed_lock = threading.Lock()
        self.folder = staging_folder(run.path if isinstance(run, RunFolder) else Path(run), unit, attempt)
        self._shard_numbers = layout.shards_of(unit)
        self._shards: dict[str, list[ShardWriter]] = {}
        self._statistics: dict[str, RowStatistics] = {}
        owned = list(layout.arrays if arrays is None else arrays)
        allow_open_files(len(owned) * layout.shards_per_unit)
        try:
            for path in owned:
                self._open(layout.array(path), direct=direct)
        except BaseException:
            self.abort()
            raise

    def write(self, array: str, row: int, data: np.ndarray[Any, Any]) -> None:
        """Store `data` as rows `row ..` of `array`; rows count inside the unit, 0 to k x R - 1.

        `data` is [n, width] for a location and [n] for labels, of the array's dtype; bfloat16 comes as
        `ml_dtypes.bfloat16` or as its uint16 bits; float32 (or bfloat16) is converted where the array is narrower, and
        float16 refuses values beyond 65,504. Raises `RowError` for rows out of range or written before and for a wrong
        shape or dtype (naming the array), `WriteError` when the disk refuses.
        """
        shards = self._shards_of(array)
        stored = as_stored(self.layout.arrays[array], data)
        gathered = self._statistics.get(array)
        n = len(stored)
        if n == 0:
            return
        if row < 0 or row + n > self.layout.unit_rows:
            raise RowError(
                f"{array}: rows {row} to {row + n - 1} are outside unit {self.unit}, which has rows 0 to "
                f"{self.layout.unit_rows - 1}."
            )
        done = 0
        while done < n:
            shard, first = divmod(row + done, self.layout.rows_per_shard)
            count = min(self.layout.rows_per_shard - first, n - done)
            piece = stored[done : done + count]
            shards[shard].write_rows(first, piece, gathered.taker(row + done) if gathered is not None else None)
            done += count

    def clear(self, array: str, row: int, n: int) -> None:
        """Make written rows `row .. row+n-1` of `array` holes again; `RowError` where one was not written."""
        shards = self._shards_of(array)
        done = 0
        while done < n:
            shard, first = divmod(row + done, self.layout.rows_per_shard)
            if row < 0 or shard >= len(shards):
                raise RowError(f"{array}: row {row + done} is outside unit {self.unit}.")
            count = min(self.layout.rows_per_shard - first, n - done)
            shards[shard].clear_rows(first, count)
            done += count
        if array in self._statistics:
            self._statistics[array].clear(row, n)

    def written(self, array: str) -> int:
        """Rows of `array` written and not cleared."""
        return sum(shard.written for shard in self._shards_of(array))

    def mask(self, array: str) -> np.ndarray[Any, Any]:
        """Which rows of `array` are written, bool [k x R]."""
        return np.concatenate([shard.mask() for shard in self._shards_of(array)])

    def seal(
        self,
        *,
        expected_rows: int | None = None,
        invokes: Iterable[InvokeReceipt | tuple[int, int, str]] = (),
        timings: Mapping[str, float] | None = None,
        fsync: bool = True,
    ) -> UnitReceipt:
        """Close all files, durable unless `fsync` is False, and return the receipt.

        Every array must hold the same rows, `expected_rows` of them where given; otherwise `RowError` names the arrays
        that differ and the writer stays open. `invokes` says how each invoke ended: (invoke, rows stored, status).
        """
        self._check_rows(expected_rows)
        todo = [
            (array, number, shard)
            for array, shards in self._shards.items()
            for number, shard in zip(self._shard_numbers, shards, strict=True)
        ]
        try:
            # Side by side, because a file system that syncs several files at once shares the work.
            with ThreadPoolExecutor(min(_SEALERS, max(1, len(todo)))) as pool:
                files = list(pool.map(lambda item: self._seal_file(*item, fsync=fsync), todo))
        except BaseException:
            self.abort()
            raise
        statistics = {
            array.removeprefix("acts/"): gathered.finish(self.mask(array))
            for array, gathered in self._statistics.items()
        }
        return UnitReceipt(
            unit=self.unit,
            attempt=self.attempt,
            files=tuple(files),
            invokes=as_invoke_receipts(invokes),
            statistics=statistics,
            timings=dict(timings or {}),
        )

    def abort(self) -> None:
        """Close and delete what was staged by this writer; the folder itself may serve other ranks."""
        for shards in self._shards.values():
            for shard in shards:
                shard.abort()

    def _open(self, spec: ArraySpec, *, direct: bool) -> None:
        is_location = spec.path.startswith("acts/")
        make_folder(self.folder / spec.path)
        shards = self._shards[spec.path] = []
        for number in self._shard_numbers:
            shard = ShardWriter(
                self.folder / spec.file(number),
                rows=self.layout.rows_per_shard,
                width=spec.width,
                dtype=spec.dtype,
                chunk_rows=spec.chunks[0],
                compression=spec.compression,
                direct=direct and is_location,
                fill=spec.fill,
            )
            shards.append(shard)  # one by one: what is open must be known should the next fail
        if is_location:
            self._statistics[spec.path] = RowStatistics(rows=self.layout.unit_rows, dtype=spec.dtype)

    def _shards_of(self, array: str) -> list[ShardWriter]:
        try:
            return self._shards[array]
        except KeyError:
            self.layout.array(array)
            raise StorageError(f"This writer owns {', '.join(self._shards)}, not {array!r}.") from None

    def _seal_file(self, array: str, number: int, shard: ShardWriter, *, fsync: bool) -> FileReceipt:
        sealed = shard.seal(fsync=fsync)
        with self._sealed_lock:
            self.sealed_files += 1
        return FileReceipt(
            array=array,
            shard=number,
            file_bytes=sealed.file_bytes,
            rows=sealed.rows,
            chunk_crcs=sealed.chunk_crcs,
            index_crc=sealed.index_crc,
            mask_crc=sealed.mask_crc,
        )

    def _check_rows(self, expected_rows: int | None) -> None:
        counts = {array: self.written(array) for array in self._shards}
        if expected_rows is not None:
            wrong = [f"{array} has {count}" for array, count in counts.items() if count != expected_rows]
            if wrong:
                raise RowError(f"Unit {self.unit} must have {expected_rows} rows, but {', '.join(wrong)}.")
        masks = {array: self.mask(array).tobytes() for array in self._shards}
        first = next(iter(masks), None)
        differ = [array for array in masks if first is not None and masks[array] != masks[first]]
        if differ:
            raise RowError(f"Unit {self.unit}: {', '.join(differ)} holds other rows than {first}.")


def as_stored(spec: ArraySpec, data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """`data` as uint8 [n, row_bytes] in the stored dtype; a view where no conversion is needed."""
    data = np.asarray(data)
    native = spec.native
    shape = data.shape[1:]
    if data.dtype is native and shape == spec.shape[1:] and data.flags.c_contiguous and len(shape) == 1:
        return data.view(np.uint8)
    if shape != spec.shape[1:]:
        wanted = f"[n, {spec.width}]" if len(spec.shape) == 2 else "[n]"
        raise RowError(f"{spec.path}: rows have shape {list(data.shape)}; {wanted} is needed.")
    if data.dtype != native and not (native == ml_dtypes.bfloat16 and data.dtype == np.uint16):
        data = _converted(spec, data)
    data = np.ascontiguousarray(data)
    return data.reshape(len(data), spec.width).view(np.uint8)


def _converted(spec: ArraySpec, data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    native = spec.native
    is_float = data.dtype in (np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16))
    if spec.path.startswith("acts/") and is_float:
        if native == np.float16:
            wide = data.astype(np.float32)
            too_big = np.isfinite(wide) & (np.abs(wide) > _FLOAT16_MAX)
            if too_big.any():
                raise RowError(
                    f"{spec.path}: value {float(wide[too_big][0]):g} does not fit float16 (largest 65504). Store this "
                    "location as bfloat16 or float32."
                )
        return data.astype(native)
    if native.kind == "i" and data.dtype.kind in "iu":
        low, high = np.iinfo(native).min, np.iinfo(native).max
        if len(data) and (int(data.min()) < low or int(data.max()) > high):
            raise RowError(f"{spec.path}: values beyond {native} cannot be stored.")
        return data.astype(native)
    if native.kind == "f" and data.dtype.kind == "f":
        return data.astype(native)
    raise RowError(f"{spec.path}: rows of dtype {data.dtype} cannot be stored as {spec.dtype}.")
