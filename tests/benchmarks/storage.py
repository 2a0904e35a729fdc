"""What the store costs: `python -m tests.benchmarks.storage [--pairs N] [--mib N] [--only NAME …] [--json PATH]`.

Every ratio is one of rates within interleaved pairs (above 1: the first of its title is faster), as the median with its
bootstrap 95 % interval; absolute rates depend on the machine and its other users. Where others use
the machine, look at `best`, the ratio of the second shortest times, and at `cpu`, the ratio of processor seconds. A
shard is bfloat16 [rows, 4096] in chunks of 64 rows.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import zarr

import storage.bfloat16  # noqa: F401  registers the data type
from storage.format import LocationSpec, StoreLayout
from storage.ledger import encode_line
from storage.reader import StoreReader
from storage.shard import ShardWriter
from storage.stats import RowStatistics
from storage.testing import ScriptedRun
from storage.verify import verify

WIDTH = 4096
ROW_BYTES = WIDTH * 2
PIECE_ROWS = 1024
BLOCK_ROWS = 1024


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """Rate of the first over rate of the second: median and 95 % interval, by the clock and by processor seconds."""

    title: str
    median: float
    low: float
    high: float
    cpu: float
    best: float
    first_gib_s: float
    pairs: int

    def __str__(self) -> str:
        return (
            f"{self.title:<68} {self.median:6.2f} [{self.low:.2f}, {self.high:.2f}]"
            f"  best {self.best:5.2f}  cpu {self.cpu:5.2f}"
            f"  ({self.first_gib_s:.2f} GiB/s, {self.pairs} pairs)"
        )


def compare(
    title: str,
    first: Callable[[], Any],
    second: Callable[[], Any],
    *,
    pairs: int,
    n_bytes: int,
    before: Callable[[], Any] = lambda: None,
) -> Ratio:
    """Run both in turn, `pairs` times, `before` each; who goes first alternates."""
    clock: list[dict[int, tuple[float, float]]] = []
    for i in range(pairs):
        seconds = {}
        for which in ((0, 1), (1, 0))[i % 2]:
            before()
            wall, cpu = time.perf_counter(), time.process_time()
            (first, second)[which]()
            seconds[which] = (time.perf_counter() - wall, time.process_time() - cpu)
        clock.append(seconds)
    ratios = [pair[1][0] / pair[0][0] for pair in clock]
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(2000))
    return Ratio(
        title=title,
        median=statistics.median(ratios),
        low=medians[50],
        high=medians[1949],
        cpu=statistics.median(pair[1][1] / max(pair[0][1], 1e-9) for pair in clock),
        best=sorted(pair[1][0] for pair in clock)[1] / sorted(pair[0][0] for pair in clock)[1],
        first_gib_s=n_bytes / statistics.median(pair[0][0] for pair in clock) / 2**30,
        pairs=pairs,
    )


def make_rows(rows: int) -> np.ndarray[Any, Any]:
    """Normal values in bfloat16, [rows, WIDTH]."""
    rng = np.random.default_rng(0)
    block = rng.standard_normal((min(rows, 4096), WIDTH), np.float32).astype(ml_dtypes.bfloat16)
    return np.concatenate([np.roll(block, i, axis=1) for i in range(-(-rows // len(block)))])[:rows]


def write_raw(path: Path, data: np.ndarray[Any, Any], *, sync: bool) -> None:
    """The same bytes by plain `write`."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    raw = data.view(np.uint8)
    for i in range(0, len(raw), PIECE_ROWS):
        os.write(fd, raw[i : i + PIECE_ROWS].data)
    if sync:
        os.fsync(fd)
    os.close(fd)


def write_shard(path: Path, data: np.ndarray[Any, Any], *, sync: bool, gather: bool = False, **options: Any) -> None:
    """The shard through our encoder, `gather` with statistics."""
    writer = ShardWriter(path, rows=len(data), width=WIDTH, dtype="bfloat16", chunk_rows=64, **options)
    statistic = RowStatistics(rows=len(data), dtype="bfloat16")
    raw = data.view(np.uint8)
    for i in range(0, len(raw), PIECE_ROWS):
        writer.write_rows(i, raw[i : i + PIECE_ROWS], statistic.taker(i) if gather else None)
    writer.seal(fsync=sync)


def write_zarr(path: Path, data: np.ndarray[Any, Any], *, sync: bool) -> None:
    """The shard through zarr-python's default pipeline."""
    array = zarr.create_array(
        path,
        shape=data.shape,
        chunks=(64, WIDTH),
        shards=data.shape,
        dtype=data.dtype,
        compressors=None,
        config={"write_empty_chunks": True},
    )
    array[:] = data
    if sync:
        fd = os.open(path / "c" / "0" / "0", os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def bench_write(folder: Path, *, name: str, sync: bool, mib: int, pairs: int) -> list[Ratio]:
    """Whole-shard writes."""
    data = make_rows((mib << 20) // ROW_BYTES)
    target = folder / "shard"

    def clean() -> None:
        shutil.rmtree(target, ignore_errors=True)
        target.unlink(missing_ok=True)
        if sync:
            os.sync()

    def raw() -> None:
        write_raw(target, data, sync=sync)

    def shard(**options: Any) -> Callable[[], None]:
        return lambda: write_shard(target, data, sync=sync, **options)

    def run(title: str, first: Callable[[], Any], second: Callable[[], Any], n: int = pairs) -> Ratio:
        return compare(f"{name}: {title}", first, second, pairs=n, n_bytes=data.nbytes, before=clean)

    few = max(3, pairs // 2)
    ratios = [
        run("direct shard / raw write", shard(), raw),
        run("direct shard / zarr-python default", shard(), lambda: write_zarr(target, data, sync=sync)),
        run("direct shard with statistics / raw write", shard(gather=True), raw, few),
        run("O_DIRECT shard / raw write", shard(direct=True), raw, few),
        run("zstd-1 shard / raw write", shard(compression="zstd"), raw, 3),
    ]
    clean()
    return ratios


def one_location_run(folder: Path, *, shards: int, rows_per_shard: int) -> Path:
    """A finished run of one location of WIDTH values."""
    script = ScriptedRun(
        n_units=shards,
        rows_per_shard=64,
        shards_per_unit=1,
        n_skipped=0,
        locations=(LocationSpec(name="wide", path="wide", width=8),),
    )
    run = script.create(folder / "run")
    script.finish(run)
    layout = StoreLayout(
        locations=(LocationSpec(name="wide", path="wide", width=WIDTH),),
        rows_per_shard=rows_per_shard,
        shards_per_unit=1,
        n_units=shards,
        n_invokes=len(script.invokes),
    )
    for shard in range(shards):
        path = run.data / layout.arrays["acts/wide"].file(shard)
        path.unlink()
        write_shard(path, make_rows(rows_per_shard), sync=True)
    return run.path


def forget(path: Path) -> None:
    """Drop a file from the page cache."""
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def bench_read(folder: Path, *, mib: int, pairs: int) -> list[Ratio]:
    """Sequential blocks of 8 MiB from a cold cache, and from a warm one."""
    shards = 2
    rows = (mib << 20) // ROW_BYTES // shards
    path = one_location_run(folder, shards=shards, rows_per_shard=rows)
    layout = StoreLayout(
        locations=(LocationSpec(name="wide", path="wide", width=WIDTH),),
        rows_per_shard=rows,
        shards_per_unit=1,
        n_units=shards,
        n_invokes=1,
    )
    files = [path / "data.zarr" / layout.arrays["acts/wide"].file(shard) for shard in range(shards)]
    out = np.empty((BLOCK_ROWS, WIDTH), ml_dtypes.bfloat16)

    def ours() -> None:
        reader = StoreReader(path)
        reader.layout = layout
        for start in range(0, rows * shards, BLOCK_ROWS):
            reader.read_into("acts/wide", start, out)
        reader.close()

    def raw() -> None:
        buffer = out.view(np.uint8).data.cast("B")
        for file in files:
            fd = os.open(file, os.O_RDONLY)
            for start in range(0, rows, BLOCK_ROWS):
                os.preadv(fd, [buffer], start * ROW_BYTES)
            os.close(fd)

    def cold() -> None:
        for file in files:
            forget(file)

    n_bytes = rows * shards * ROW_BYTES
    return [
        compare("cold: block read / raw preadv", ours, raw, pairs=pairs, n_bytes=n_bytes, before=cold),
        compare("warm: block read / raw preadv", ours, raw, pairs=pairs, n_bytes=n_bytes),
    ]


def bench_open(folder: Path, *, units: int = 10_000) -> dict[str, float]:
    """Seconds to open a run of many units, and to read its plan's summary is not part of it."""
    script = ScriptedRun(
        n_units=1, rows_per_shard=64, shards_per_unit=1, locations=(LocationSpec(name="a", path="a", width=8),)
    )
    run = script.create(folder / "many")
    script.finish(run)
    line = {"attempt": 100001, "rows": 60, "bytes": 9999, "receipt": [0, 1, "0" * 32]}
    run.ledger.write_bytes(
        b"".join(encode_line({"seq": i, "group": i, "unit": i - 1, **line}) for i in range(1, units + 1))
    )
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        assert len(StoreReader(run.path).committed) == units
        seconds.append(time.perf_counter() - began)
    return {f"open a run of {units} units, s": statistics.median(seconds)}


_MEMORY = """
import sys
import numpy as np
from pathlib import Path
from storage.shard import ShardWriter
path, mib, options = Path(sys.argv[1]), int(sys.argv[2]), eval(sys.argv[3])
rows = (mib << 20) // 8192
piece = np.random.default_rng(0).integers(0, 255, (96, 8192), np.uint8)
def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024
warm = ShardWriter(path, rows=1024, width=4096, dtype="bfloat16", chunk_rows=64, **options)
warm.write_rows(0, piece); warm.abort()
before = peak()
writer = ShardWriter(path, rows=rows, width=4096, dtype="bfloat16", chunk_rows=64, **options)
order = np.random.default_rng(1).permutation(rows // 96) * 96
for row in order.tolist():
    writer.write_rows(row, piece)
writer.seal(fsync=False)
print(peak() - before)
"""


def bench_memory(folder: Path, *, mib: int) -> dict[str, float]:
    """MiB of memory beyond the caller's rows while a shard is written in random order, 96 rows at a time."""
    found = {}
    for name, options in (("plain", {}), ("zstd-1", {"compression": "zstd"}), ("O_DIRECT", {"direct": True})):
        done = subprocess.run(
            [sys.executable, "-c", _MEMORY, str(folder / f"m-{name}"), str(mib), repr(options)],
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parents[2],
        )
        (folder / f"m-{name}").unlink(missing_ok=True)
        found[f"extra memory of a {mib} MiB shard, {name}, MiB"] = float(done.stdout)
    return found


def bench_verify(folder: Path, *, mib: int) -> dict[str, float]:
    """GiB/s of `verify` over a real store of one wide location, warm cache, with and without statistics."""
    rows = (mib << 20) // ROW_BYTES
    script = ScriptedRun(
        n_units=1,
        rows_per_shard=rows,
        shards_per_unit=1,
        lengths=(1024,),
        fill=1.0,
        locations=(LocationSpec(name="wide", path="wide", width=WIDTH),),
    )
    run = script.create(folder / "verify")
    script.finish(run)
    found = {}
    for name, statistic in (("with statistics", True), ("digests and labels", False)):
        seconds = []
        for _ in range(3):
            report = verify(run.path, statistics=statistic)
            assert report.ok, report.findings
            seconds.append(report.bytes_checked / report.seconds / 2**30)
        found[f"verify, {name}, GiB/s"] = statistics.median(seconds)
    return found


NAMES = ("tmpfs", "disk", "read", "open", "memory", "verify")


def run_all(*, pairs: int, mib: int, only: Sequence[str] = NAMES, disk: Path | None = None) -> dict[str, Any]:
    """Run the benchmarks of `only`; prints as it goes and returns everything."""
    results: dict[str, Any] = {"cores": os.cpu_count(), "load": os.getloadavg()[0], "ratios": [], "figures": {}}
    memory = tempfile.mkdtemp(prefix="harvest-bench-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
    on_disk = tempfile.mkdtemp(prefix="harvest-bench-", dir=disk)

    def keep(ratios: list[Ratio]) -> None:
        for ratio in ratios:
            print(ratio, flush=True)
            results["ratios"].append(asdict(ratio))

    def keep_figures(figures: dict[str, float]) -> None:
        for title, figure in figures.items():
            print(f"{title:<68} {figure:.3f}", flush=True)
        results["figures"] |= figures

    try:
        if "tmpfs" in only:
            keep(bench_write(Path(memory), name="tmpfs", sync=False, mib=mib, pairs=pairs))
        if "disk" in only:
            keep(bench_write(Path(on_disk), name="disk + fsync", sync=True, mib=mib, pairs=pairs))
        if "read" in only:
            keep(bench_read(Path(on_disk), mib=mib, pairs=pairs))
        if "open" in only:
            keep_figures(bench_open(Path(on_disk)))
        if "memory" in only:
            keep_figures(bench_memory(Path(on_disk), mib=512))
        if "verify" in only:
            keep_figures(bench_verify(Path(memory), mib=mib))
        results["peak_memory_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    finally:
        shutil.rmtree(memory, ignore_errors=True)
        shutil.rmtree(on_disk, ignore_errors=True)
    return results


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--mib", type=int, default=256, help="MiB of a shard")
    parser.add_argument("--only", nargs="*", default=NAMES, choices=NAMES)
    parser.add_argument(
        "--disk", type=Path, help="a folder on the disk to measure; the default temporary one if absent"
    )
    parser.add_argument("--json", type=Path, help="write the results here")
    options = parser.parse_args()
    results = run_all(pairs=options.pairs, mib=options.mib, only=options.only, disk=options.disk)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
