"""What shuffling costs: `python -m tests.benchmarks.loader [--pairs N] [--mib N] [--json PATH]`.

An epoch of `RowLoader` over bfloat16 rows of 4096 values in batches of 4096, against reads of as many rows in the
store's order, from a warm and from a cold page cache; and against batches of random rows by zarr-python, which is what
one writes without a loader. Ratios are as in tests/benchmarks/storage.py: above 1, the loader is faster.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from harvest.loader import RowLoader
from storage.format import LocationSpec
from storage.reader import StoreReader
from storage.run_folder import RunFolder
from storage.testing import ScriptedRun
from tests.benchmarks.storage import ROW_BYTES, WIDTH, Ratio, compare, forget, make_rows, write_shard

BATCH_ROWS = 4096
UNITS = 4


def make_run(folder: Path, *, mib: int) -> RunFolder:
    """A finished run of one location."""
    unit_rows = (mib << 20) // ROW_BYTES // UNITS
    script = ScriptedRun(
        n_units=UNITS,
        rows_per_shard=unit_rows,
        shards_per_unit=1,
        n_skipped=0,
        lengths=(1024,),
        fill=1.0,
        locations=(LocationSpec(name="wide", path="wide", width=WIDTH),),
    )
    run = script.create(folder / f"run-{mib}")
    script.finish(run)
    for path in shards(run):
        path.unlink()
        write_shard(path, make_rows(unit_rows), sync=True)
    return run


def shards(run: RunFolder) -> list[Path]:
    """Files of the location."""
    return [path for path in (run.data / "acts" / "wide").iterdir() if path.name.startswith("c.")]


def bench_epoch(folder: Path, *, mib: int, pairs: int) -> list[Ratio]:
    """Against the same amount in the store's order."""
    run = make_run(folder, mib=mib)
    loader = RowLoader(run.path, "wide", batch_size=BATCH_ROWS)
    n_rows = len(loader) * BATCH_ROWS

    def shuffled() -> None:
        assert sum(len(batch) for batch in loader) == n_rows

    def in_order() -> None:
        reader = StoreReader(run.path)
        for start in range(0, n_rows, BATCH_ROWS):
            reader.rows("wide", slice(start, start + BATCH_ROWS))
        reader.close()

    def cold() -> None:
        for path in shards(run):
            forget(path)

    options: dict[str, Any] = {"pairs": pairs, "n_bytes": n_rows * ROW_BYTES}
    return [
        compare("warm: shuffled epoch / reads in order", shuffled, in_order, **options),
        compare("cold: shuffled epoch / reads in order", shuffled, in_order, before=cold, **options),
    ]


def bench_random_rows(folder: Path, *, mib: int, pairs: int) -> list[Ratio]:
    """Against batches of rows that are drawn from the whole store."""
    run = make_run(folder, mib=mib)
    loader = RowLoader(run.path, "wide", batch_size=BATCH_ROWS)
    array: Any = zarr.open_group(run.data, mode="r")["acts/wide"]
    n_rows = len(loader) * BATCH_ROWS

    def shuffled() -> None:
        assert sum(len(batch) for batch in loader) == n_rows

    def drawn() -> None:
        order = np.random.default_rng(0).permutation(array.shape[0])
        for start in range(0, n_rows, BATCH_ROWS):
            array.oindex[np.sort(order[start : start + BATCH_ROWS])]

    n_bytes = n_rows * ROW_BYTES
    return [compare("warm: shuffled epoch / random rows by zarr", shuffled, drawn, pairs=pairs, n_bytes=n_bytes)]


def run_all(*, pairs: int, mib: int) -> list[Ratio]:
    """All ratios; a fraction of the bytes where random rows are read."""
    with tempfile.TemporaryDirectory(prefix="harvest-bench-") as name:
        folder = Path(name)
        found = bench_epoch(folder, mib=mib, pairs=pairs)
        found += bench_random_rows(folder, mib=max(mib // 4, 64), pairs=min(pairs, 5))
    for ratio in found:
        print(ratio, flush=True)
    return found


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = run_all(pairs=options.pairs, mib=options.mib)
    if options.json:
        options.json.write_text(json.dumps([asdict(ratio) for ratio in found], indent=2))


if __name__ == "__main__":
    main()
