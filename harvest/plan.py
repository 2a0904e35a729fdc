"""Plan: which unit and which rows each invoke gets. Pure: numpy only, no files, no Ray, torch or zarr.

Every row's place is fixed here, before any engine starts, so placement does not depend on what happens later.

Invariants:
- each invoke lies in one unit, whole, on consecutive rows that no other invoke has;
- the same input and seed give the same plan on every machine;
- units are filled in the order of a seeded shuffle, so that consecutive rows of the store are a random sample of
  invokes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from harvest.errors import PlanError

# Small datasets still get this many units, so that a resumed run has something to skip and engines share the work.
MIN_UNITS = 8
# A unit's bytes over all locations: what an engine stages before it commits.
UNIT_BYTES = 8 * 1024**3
MIN_ROWS_PER_SHARD = 64
# Units kept open while packing: more fill the gaps that long invokes leave, fewer keep the shuffle's order.
OPEN_UNITS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitShape:
    """Rows of a shard, and shards of a unit."""

    rows_per_shard: int
    shards_per_unit: int

    @property
    def unit_rows(self) -> int:
        """Rows of a unit."""
        return self.rows_per_shard * self.shards_per_unit


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """The place of each invoke. P is the number of invokes."""

    n_units: int
    unit: NDArray[np.int32]
    """[P]"""
    unit_row: NDArray[np.int64]
    """[P] first row, counted inside the unit."""
    order: NDArray[np.int64]
    """[P] invoke indices, sorted by unit and row."""


def choose_shape(
    *,
    n_rows: NDArray[np.int64],
    n_tokens: NDArray[np.int64],
    widest_row_bytes: int,
    all_rows_bytes: int,
    shard_bytes: int,
    unit_tokens: int,
    rows_per_shard: int | None = None,
    shards_per_unit: int | None = None,
) -> UnitShape:
    """Choose shard and unit sizes from targets.

    Args:
        n_rows: [P] rows reserved for each invoke.
        n_tokens: [P] prompt tokens of each invoke.
        widest_row_bytes: bytes of a row at the widest location.
        all_rows_bytes: bytes of one token's rows at all locations.
        shard_bytes: wanted bytes of a shard of the widest location.
        unit_tokens: wanted prompt tokens of a unit.
        rows_per_shard: fixed by the user.
        shards_per_unit: fixed by the user.

    Raises:
        PlanError: an invoke has more rows than the user's fixed unit.
    """
    longest = int(n_rows.max(initial=1))
    total_rows, total_tokens = int(n_rows.sum()), max(1, int(n_tokens.sum()))
    if rows_per_shard is None:
        rows_of_unit = max(1, unit_tokens * total_rows // total_tokens)
        wanted = min(shard_bytes // widest_row_bytes, rows_of_unit, max(1, total_rows // MIN_UNITS))
        rows = max(MIN_ROWS_PER_SHARD, _power_of_two_below(max(1, wanted)))
        # An invoke fits a shard, unless the user has fixed how many shards a unit has.
        rows_per_shard = max(rows, _power_of_two_above(-(-longest // (shards_per_unit or 1))))
    if shards_per_unit is None:
        by_tokens = unit_tokens * total_rows // total_tokens // rows_per_shard
        by_bytes = UNIT_BYTES // (rows_per_shard * all_rows_bytes)
        by_count = max(1, total_rows // MIN_UNITS // rows_per_shard)
        shards_per_unit = max(1, min(by_tokens, by_bytes, by_count), -(-longest // rows_per_shard))
    shape = UnitShape(rows_per_shard=rows_per_shard, shards_per_unit=shards_per_unit)
    if longest > shape.unit_rows:
        raise PlanError(
            f"the longest invoke has {longest:,} rows, a unit only {shape.unit_rows:,} "
            f"({rows_per_shard:,} rows a shard x {shards_per_unit} shards): raise store.rows_per_shard or "
            "store.shards_per_unit"
        )
    return shape


def pack(
    *, n_rows: NDArray[np.int64], n_tokens: NDArray[np.int64], unit_rows: int, unit_tokens: int, seed: int
) -> Packing:
    """Give each invoke a unit and a row.

    Args:
        n_rows: [P] rows reserved for each invoke; none more than `unit_rows`.
        n_tokens: [P] prompt tokens of each invoke.
        unit_rows: rows of a unit.
        unit_tokens: a unit takes no further invoke once it has so many prompt tokens.
        seed: of the shuffle.
    """
    n_invokes = len(n_rows)
    shuffled = np.random.Generator(np.random.Philox(seed)).permutation(n_invokes)
    unit = np.zeros(n_invokes, np.int32)
    unit_row = np.zeros(n_invokes, np.int64)
    open_units: list[list[int]] = []  # [unit, used rows, used tokens], oldest first
    n_units = 0
    for index, rows, tokens in zip(
        shuffled.tolist(), n_rows[shuffled].tolist(), n_tokens[shuffled].tolist(), strict=True
    ):
        for candidate in open_units:
            if candidate[1] + rows <= unit_rows and (candidate[2] + tokens <= unit_tokens or candidate[2] == 0):
                break
        else:
            if len(open_units) == OPEN_UNITS:
                open_units.pop(0)
            candidate = [n_units, 0, 0]
            open_units.append(candidate)
            n_units += 1
        unit[index], unit_row[index] = candidate[0], candidate[1]
        candidate[1] += rows
        candidate[2] += tokens
    return Packing(n_units=n_units, unit=unit, unit_row=unit_row, order=np.lexsort((unit_row, unit)))


def _power_of_two_below(value: int) -> int:
    return 1 << (value.bit_length() - 1)


def _power_of_two_above(value: int) -> int:
    return 1 << (value - 1).bit_length()
