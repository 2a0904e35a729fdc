"""One sitting: all systems resident on one device, their workloads in turn, several times over.

    python -m tests.benchmarks.gpu --systems plain one four all stop --out r.jsonl
    python -m tests.benchmarks.gpu --systems hf extract nnsight one stop --out r.jsonl
    python -m tests.benchmarks.gpu --systems plain plain-mp one hook blocks --only decode --repeats 9
    python -m tests.benchmarks.gpu --small                      a dry run on a CPU
    python -m tests.benchmarks.gpu.table r.jsonl                a Markdown table of medians and ratios

Starting side by side costs the time of the slowest, and measuring in turn spreads a drift of the machine over all of
them. An idle engine does not touch the device. Results are appended to `--out` as they come; the sitting ends by itself
before `--limit-s`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import numpy as np

from tests.benchmarks.gpu.child import add_options

# What each system runs, in this order.
SCHEDULE = {
    "plain": ["prefill", "short", "decode"],
    "one": ["prefill", "prefill-disk", "decode", "decode-disk"],
    "four": ["prefill-disk"],
    "all": ["prefill", "few-disk"],
    "stop": ["prefill-disk", "short-disk"],
    "hf": ["prefill"],
    "extract": ["prefill"],
    "nnsight": ["prefill"],
    "plain-mp": ["prefill", "decode"],
    "hook": ["decode"],
    "blocks": ["decode"],
    "blocks-eager": ["decode"],
}


SETTLE_S = 4.0


class Child:
    """A system's process."""

    def __init__(self, system: str, arguments: list[str], log: Path) -> None:
        self.system = system
        self._log = open(log, "w")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.benchmarks.gpu.child", system, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )

    def answer(self) -> dict[str, Any]:
        """Its next answer; an `error` if it has ended."""
        stream: IO[str] | None = self._process.stdout
        assert stream is not None
        for line in stream:
            if line.startswith("@@"):
                return dict(json.loads(line[2:]))
            self._log.write(line)
        return {"error": f"ended with exit code {self._process.wait()}"}

    def ask(self, **command: Any) -> dict[str, Any]:
        """Run one workload."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return {"error": "ended"}
        return self.answer()

    def kill(self) -> None:
        """End it."""
        self._process.kill()


def measure_disk(folder: str | None, *, n_files: int, threads: int = 8) -> dict[str, Any]:
    """The disk's raw write rate: a thread for each file of 256 MiB, fsynced."""
    block = np.random.default_rng(0).bytes(16 << 20)
    root = Path(tempfile.mkdtemp(prefix="harvest-disk-", dir=folder))

    def write(number: int) -> None:
        fd = os.open(root / f"{number}", os.O_WRONLY | os.O_CREAT)
        for _ in range(16):
            os.write(fd, block)
        os.fsync(fd)
        os.close(fd)

    begun = time.monotonic()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(write, range(n_files)))
    seconds = time.monotonic() - begun
    for path in root.iterdir():
        path.unlink()
    root.rmdir()
    return {"seconds": seconds, "stored_bytes": n_files << 28, "gb_s": (n_files << 28) / seconds / 1e9}


def settle() -> None:
    """Let the disk finish with what others have written and deleted."""
    os.sync()
    time.sleep(SETTLE_S)


def main() -> None:
    """Start all, then go round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="+", default=["plain", "one", "four", "all", "stop"])
    parser.add_argument("--skip", nargs="*", default=[], help="system:workload pairs to leave out")
    parser.add_argument("--only", nargs="*", default=[], help="workloads; none: all of a system")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit-s", type=float, default=560)
    parser.add_argument("--disk-files", type=int, default=32, help="256 MiB each, for the disk's raw rate; 0: skip")
    parser.add_argument("--profile", nargs="*", default=[], help="system:workload, to run once more under a profiler")
    parser.add_argument("--out", type=Path, default=Path("results.jsonl"))
    add_options(parser)
    options = parser.parse_args()
    deadline = time.monotonic() + options.limit_s
    arguments = _child_arguments(options)
    children = {name: Child(name, arguments, options.out.with_name(f"{name}.log")) for name in options.systems}
    threading.Timer(options.limit_s, lambda: _end(children)).start()
    for name, child in list(children.items()):
        started = child.answer()
        _note(options.out, system=name, kind="start", **started)
        if "error" in started:
            del children[name]
    rounds = [
        (name, workload)
        for name in children
        for workload in SCHEDULE[name]
        if f"{name}:{workload}" not in options.skip and workload in (options.only or [workload])
    ]
    for repeat in range(options.repeats + 1):
        if repeat and options.disk_files and any(workload.endswith("-disk") for _, workload in rounds):
            settle()
            _note(options.out, system="disk", workload="raw", repeat=repeat, **_disk(options))
        for name, workload in rounds if repeat % 2 else rounds[::-1]:
            if name not in children or time.monotonic() > deadline - 25:
                continue
            if workload.endswith("-disk"):
                settle()
            result = children[name].ask(workload=workload, seed=repeat, warm_up=repeat == 0)
            _note(options.out, system=name, workload=workload, repeat=repeat, **result)
            if "error" in result:
                del children[name]
    for profiled in options.profile:
        name, workload = profiled.split(":")
        if name in children and time.monotonic() < deadline - 25:
            result = children[name].ask(workload=workload, seed=99, warm_up=True, profile=True)
            _note(options.out, system=name, workload=workload, kind="profile", **result)
    _end(children)


def _child_arguments(options: argparse.Namespace) -> list[str]:
    arguments = []
    for name in ("tp", "executor", "kv_gib", "ring_bytes", "writer_threads", "rows_per_shard", "disk"):
        if (value := getattr(options, name)) is not None:
            arguments += [f"--{name.replace('_', '-')}", str(value)]
    return arguments + [f"--{name}" for name in ("small", "eager") if getattr(options, name)]


def _disk(options: argparse.Namespace) -> dict[str, Any]:
    return measure_disk(options.disk, n_files=1 if options.small else options.disk_files)


def _note(out: Path, **fields: Any) -> None:
    line = json.dumps(fields)
    print("RESULT", line, flush=True)
    with open(out, "a") as file:
        file.write(line + "\n")


def _end(children: dict[str, Child]) -> None:
    for child in children.values():
        child.kill()
    os._exit(0)


if __name__ == "__main__":
    main()
