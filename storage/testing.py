"""A scripted run for tests: a plan and rows that follow from a seed, with no model, engine or cluster.

`ScriptedRun` knows what every array of the finished store must hold, so any path to that store — undisturbed, crashed
and resumed, raced, through another writer — is checked with `assert_store`. One location, `attempt`, holds the number
of the attempt in every row, which shows two attempts that mix inside a unit. Whoever builds another backend or writer
runs `store_suite` over it.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from storage.commit import Committer
from storage.format import Compression, LocationSpec, StoreLayout, numpy_dtype
from storage.plan_files import INVOKE_SCHEMA, SKIPPED_SCHEMA, PlanSource
from storage.reader import StoreReader
from storage.receipt import UnitReceipt
from storage.run_folder import RunFolder
from storage.unit_writer import UnitWriter
from storage.verify import verify

ATTEMPT = "acts/attempt"


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptedInvoke:
    """One planned invoke and how it will end."""

    invoke: int
    unit: int
    row_start: int
    reserved: int
    n_prompt: int
    max_tokens: int
    n_rows: int
    status: str


@dataclass(frozen=True, kw_only=True)
class ScriptedRun:
    """A run that follows from its fields alone.

    Prompts have one of `lengths` tokens, at most 4096; a unit takes another prompt with probability `fill`.
    """

    seed: int = 0
    n_units: int = 4
    rows_per_shard: int = 128
    shards_per_unit: int = 2
    chunk_rows: int = 64
    n_skipped: int = 1
    lengths: tuple[int, ...] = (1, 3, 17, 64, 90)
    fill: float = 0.9
    compression: Compression | None = None
    locations: tuple[LocationSpec, ...] = (
        LocationSpec(name="residual.1", path="model.layers.1.output.0", alias="residual.1", width=32),
        LocationSpec(name="model.layers.0.mlp.output", path="model.layers.0.mlp.output", width=24, dtype="float32"),
    )

    @cached_property
    def layout(self) -> StoreLayout:
        """The layout, with the `attempt` location added."""
        attempt = LocationSpec(name="attempt", path="attempt", width=2, dtype="float32")
        return StoreLayout(
            locations=(*self.locations, attempt),
            rows_per_shard=self.rows_per_shard,
            shards_per_unit=self.shards_per_unit,
            n_units=self.n_units,
            n_invokes=len(self.invokes) + self.n_skipped,
            chunk_rows=self.chunk_rows,
            compression=self.compression,
            plan_hash=f"scripted-{self.seed}",
            logprobs=True,
        )

    @cached_property
    def invokes(self) -> tuple[ScriptedInvoke, ...]:
        """All planned invokes, in row order: prompts, generating ones, a truncated and a quarantined one."""
        rng = random.Random(self.seed)
        invokes: list[ScriptedInvoke] = []
        unit_rows = self.rows_per_shard * self.shards_per_unit
        for unit in range(self.n_units):
            used = 0
            while unit_rows - used > 0 and (used == 0 or rng.random() < self.fill):
                n_prompt = min(rng.choice(self.lengths), unit_rows - used)
                max_tokens = rng.choice((1, 1, 1, 6))
                if used + n_prompt + max_tokens - 1 > unit_rows:
                    max_tokens = 1
                reserved = n_prompt + max_tokens - 1
                status, n_rows = "ok", n_prompt + rng.randrange(max_tokens)
                if rng.random() < 0.1:
                    status, n_rows = "quarantined", 0
                elif rng.random() < 0.1:
                    status = "truncated"
                invokes.append(
                    ScriptedInvoke(
                        invoke=len(invokes),
                        unit=unit,
                        row_start=unit * unit_rows + used,
                        reserved=reserved,
                        n_prompt=n_prompt,
                        max_tokens=max_tokens,
                        n_rows=n_rows,
                        status=status,
                    )
                )
                used += reserved
        return tuple(invokes)

    def of_unit(self, unit: int) -> list[ScriptedInvoke]:
        """The invokes of `unit`."""
        return [x for x in self.invokes if x.unit == unit]

    def tokens(self, invoke: int, n: int) -> np.ndarray[Any, Any]:
        """The first `n` token ids of an invoke, int32 [n]."""
        return np.random.default_rng([self.seed, invoke, 1]).integers(0, 50_000, 4096).astype(np.int32)[:n]

    def rows(self, array: str, invoke: ScriptedInvoke, attempt: int = 0) -> np.ndarray[Any, Any]:
        """What the rows of `invoke` hold in `array`, [n_rows, width] or [n_rows]."""
        n = invoke.n_rows
        if array == "tokens/id":
            return self.tokens(invoke.invoke, n)
        if array == "tokens/position":
            return np.arange(n, dtype=np.int32)
        if array == "tokens/invoke":
            return np.full(n, invoke.invoke, np.int64)
        if array == ATTEMPT:
            return np.full((n, 2), attempt, np.float32)
        spec = self.layout.arrays[array]
        name = int.from_bytes(array.encode()[-4:], "little")
        values = np.random.default_rng([self.seed, invoke.invoke, name]).standard_normal((4096, spec.width), np.float32)
        shape = (n, *spec.shape[1:])
        return values[:n].reshape(shape).astype(numpy_dtype(spec.dtype))

    def plan(self) -> PlanSource:
        """The plan, as `RunFolder.create` takes it."""

        def table(unit: int) -> pa.Table:
            rows = [
                {
                    "invoke": x.invoke,
                    "key": f"row-{x.invoke}",
                    "unit": x.unit,
                    "row_start": x.row_start,
                    "n_rows": x.reserved,
                    "n_prompt_tokens": x.n_prompt,
                    "max_tokens": x.max_tokens,
                    "truncated": x.status == "truncated",
                    "token_ids": self.tokens(x.invoke, x.n_prompt).tolist(),
                }
                for x in self.of_unit(unit)
            ]
            return pa.Table.from_pylist(rows, schema=INVOKE_SCHEMA)

        skipped = [
            {"invoke": len(self.invokes) + i, "key": None, "status": "skipped", "reason": "empty", "detail": ""}
            for i in range(self.n_skipped)
        ]
        units = (table(unit) for unit in range(self.n_units))
        return PlanSource(units=units, skipped=pa.Table.from_pylist(skipped, schema=SKIPPED_SCHEMA))

    def create(self, path: Path) -> RunFolder:
        """Make the run at `path`."""
        return RunFolder.create(
            path,
            layout=self.layout,
            plan=self.plan(),
            run={"name": "scripted", "seed": self.seed},
            config_toml=f"seed = {self.seed}\n",
            provenance={"by": "storage.testing"},
        )

    def open_or_create(self, path: Path) -> RunFolder:
        """What a command that may be resuming does."""
        return RunFolder.open(path) if RunFolder.exists(path) else self.create(path)

    def writes(self, unit: int, attempt: int, *, arrays: Sequence[str] | None = None) -> list[tuple[str, int, Any]]:
        """The `UnitWriter.write` calls of an attempt, in an order that follows from its number; pieces of any size."""
        rng = random.Random(self.seed * 1_000_003 + unit * 1009 + attempt)
        calls = []
        first_row = self.layout.rows_of(unit).start
        for invoke in self.of_unit(unit):
            cuts = sorted({0, invoke.n_rows, *(rng.randint(0, invoke.n_rows) for _ in range(rng.randint(0, 3)))})
            for start, stop in itertools.pairwise(cuts):
                for array in self.layout.arrays if arrays is None else arrays:
                    data = self.rows(array, invoke, attempt)[start:stop]
                    calls.append((array, invoke.row_start - first_row + start, data))
        rng.shuffle(calls)
        return calls

    def outcomes(self, unit: int) -> list[tuple[int, int, str]]:
        """How the invokes of `unit` end, as a receipt says it."""
        return [(x.invoke, x.n_rows, x.status) for x in self.of_unit(unit)]

    def attempt(self, run: RunFolder, unit: int, attempt: int, **options: Any) -> UnitReceipt:
        """Write and seal one attempt at `unit`."""
        writer = UnitWriter(run, run.layout, unit=unit, attempt=attempt, **options)
        for array, row, data in self.writes(unit, attempt):
            writer.write(array, row, data)
        expected = sum(x.n_rows for x in self.of_unit(unit))
        return writer.seal(expected_rows=expected, invokes=self.outcomes(unit))

    def finish(self, run: RunFolder, *, at_once: int = 2) -> None:
        """Do whatever is left of the run, as a driver would, and finalise it."""
        with Committer.open(run) as committer:
            left = sorted(set(range(self.n_units)) - committer.committed)
            for i in range(0, len(left), at_once):
                receipts = [self.attempt(run, unit, committer.next_attempt(unit)) for unit in left[i : i + at_once]]
                published = committer.publish(receipts)
                assert not published.refused, published.refused
            committer.finalise()

    def assert_units(self, run: RunFolder) -> None:
        """Every committed unit is whole, of one attempt, and what the script says."""
        reader = StoreReader(run)
        try:
            for unit in sorted(reader.committed):
                rows = self.layout.rows_of(unit)
                attempt = reader.receipt(unit).attempt
                for array, spec in self.layout.arrays.items():
                    found = reader.array(array, rows)
                    expected = np.full(found.shape, spec.fill, spec.native)
                    for invoke in self.of_unit(unit):
                        where = slice(invoke.row_start - rows.start, invoke.row_start - rows.start + invoke.n_rows)
                        expected[where] = self.rows(array, invoke, attempt)
                    assert found.tobytes() == expected.tobytes(), f"unit {unit}: {array} differs"
        finally:
            reader.close()

    def assert_store(self, run: RunFolder) -> None:
        """The run is complete, sound to `verify`, and holds what an undisturbed run holds."""
        report = verify(run.path)
        damage = [str(finding) for finding in report.findings if finding.severity == "damage"]
        assert report.complete and not damage, damage
        assert report.units_committed == self.n_units
        self.assert_units(run)


def store_suite(script: ScriptedRun, path: Path) -> None:
    """What any store must do with a scripted run: races, late twins, resumption, and the same rows in the end."""
    run = script.open_or_create(path)
    with Committer.open(run) as committer:
        first, second = committer.next_attempt(0), committer.next_attempt(0)
        assert first != second
        late = script.attempt(run, 0, first)
        early = script.attempt(run, 0, second)
        assert committer.publish([early]).committed == (0,)
        assert committer.publish([late]).dropped == ((0, first),)
        assert committer.publish([early]).dropped == ((0, second),)
        assert committer.committed == {0}
        abandoned = UnitWriter(run, run.layout, unit=1, attempt=committer.next_attempt(1))
        array, row, data = script.writes(1, abandoned.attempt)[0]
        abandoned.write(array, row, data)
    reader = StoreReader(RunFolder.open(path))
    assert reader.committed == {0}
    assert reader.receipt(0).attempt == second
    reader.close()
    with Committer.open(RunFolder.open(path)) as committer:
        assert committer.publish([late]).dropped == ((0, first),)
        assert committer.next_attempt(0) not in (first, second)
    script.finish(RunFolder.open(path))
    script.assert_store(RunFolder.open(path))
    with Committer.open(RunFolder.open(path)) as committer:
        assert committer.complete
        assert committer.publish([early]).dropped
        committer.finalise()
