"""Whole runs by the product's driver, Ray and all: speed by number of engines, the driver's cost, what a kill leaves.

    python -m tests.benchmarks.gpu.fleet --engines 1 2 --out r.jsonl             two engines against one
    python -m tests.benchmarks.gpu.fleet --engines 1 --tp 2 --out r.jsonl        one engine over two devices
    python -m tests.benchmarks.gpu.fleet --engines 2 --kill --out r.jsonl        an engine is SIGKILLed in mid-run
    python -m tests.benchmarks.gpu.fleet --small                                 a dry run on a CPU

Speed is that of the committed units from the moment when all engines are ready to the last commit. Driver CPU is the
processor time of this process in a run, over its wall time. After a kill nothing of the engine may be left: its
processes, and what they held of the device.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from tests.benchmarks.gpu.child import OURS
from tests.benchmarks.gpu.shapes import Workload, make_model_folder, make_prompts
from tests.benchmarks.gpu.systems import CAPTURE_SIZES, max_model_len


def write_prompts(path: Path, workload: Workload, vocabulary: int) -> None:
    """A Parquet file of token ids."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"ids": make_prompts(workload, vocabulary, seed=0)}), path)


def make_config(options: argparse.Namespace, root: Path, engines: int) -> Any:
    """The configuration of one run."""
    from harvest.config import parse_config

    folder, model = make_model_folder(options.small)
    length = 48 if options.small else 1024
    n_prompts = 64 if options.small else options.prompts * engines
    workload = Workload(name="fleet", n_prompts=n_prompts, length=length)
    write_prompts(root / "prompts.parquet", workload, model["vocab_size"])
    locations, stop = OURS[options.locations]
    vllm: dict[str, Any] = {"load_format": "dummy", "max_num_batched_tokens": 512 if options.small else 8192}
    if not options.small:
        vllm["gpu_memory_utilization"] = 0.85
        vllm["compilation_config"] = {"cudagraph_capture_sizes": CAPTURE_SIZES}
    if options.executor:
        vllm["distributed_executor_backend"] = options.executor
    if not stop:
        # The last location keeps all layers running, as plain vLLM runs them.
        locations = f"{locations},final_norm"
    return parse_config(
        {
            "model": {"name": str(folder), "max_length": max_model_len(options)},
            "dataset": {"path": str(root / "prompts.parquet"), "tokens_column": "ids"},
            "capture": {"locations": ["residual.1"] if options.small else locations.split(",")},
            "store": {"path": str(root / "run"), "unit_tokens": 16 * length},
            "engine": {"count": engines, "tensor_parallel_size": options.tp, "vllm": vllm},
            "limits": {"ring_bytes": options.ring_bytes, "writer_threads": 8},
        }
    )


class Killer(threading.Thread):
    """Waits for a committed unit, then kills an engine, and looks at what is left of it."""

    def __init__(self, events: Path) -> None:
        super().__init__(daemon=True)
        self._events = events
        self.found: dict[str, Any] = {}

    def run(self) -> None:
        """See the class."""
        while not (ready := self._pids()) or not self._has("commit"):
            time.sleep(0.05)
        victim = psutil.Process(ready[0])
        family = [victim, *victim.children(recursive=True)]
        os.kill(victim.pid, signal.SIGKILL)
        begun = time.monotonic()
        _, alive = psutil.wait_procs(family, timeout=30)
        self.found = {
            "killed": len(family),
            "left_over": [process.pid for process in alive],
            "gone_after_s": round(time.monotonic() - begun, 2),
            "on_device": sorted({process.pid for process in family} & set(device_processes())),
        }

    def _pids(self) -> list[int]:
        return [event["pid"] for event in read_events(self._events) if event["event"] == "engine_ready"]

    def _has(self, name: str) -> bool:
        return any(event["event"] == name for event in read_events(self._events))


def read_events(path: Path) -> list[dict[str, Any]]:
    """All events so far."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def device_processes() -> list[int]:
    """Processes that hold memory of a device."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    return [int(pid) for pid in subprocess.run(command, capture_output=True, text=True).stdout.split()]


def measure(options: argparse.Namespace, engines: int) -> dict[str, Any]:
    """One run."""
    import harvest
    from harvest.runs import open_or_plan
    from storage.verify import verify

    root = Path(tempfile.mkdtemp(prefix="harvest-fleet-", dir=options.disk))
    config = make_config(options, root, engines)
    open_or_plan(config)
    events_path = root / "run" / "events.jsonl"
    killer = Killer(events_path) if options.kill else None
    if killer is not None:
        killer.start()
    wall, cpu = time.monotonic(), time.process_time()
    harvest.run(config)
    wall, cpu = time.monotonic() - wall, time.process_time() - cpu
    events = read_events(events_path)
    ready = [event["time_s"] for event in events if event["event"] == "engine_ready"][:engines]
    commits = [event for event in events if event["event"] == "commit" and event["time_s"] >= max(ready)]
    serving_s = commits[-1]["time_s"] - max(ready)
    result = {
        "engines": engines,
        "tp": options.tp,
        "locations": options.locations,
        "tok_s": sum(event["n_prompt_tokens"] for event in commits) / serving_s,
        "serving_s": serving_s,
        "driver_cpu_cores": cpu / wall,
        "ok": verify(root / "run").ok,
        "lost": sum(event["event"] == "engine_lost" for event in events),
    }
    if killer is not None:
        killer.join(60)
        result["kill"] = killer.found
    shutil.rmtree(root)
    return result


def main() -> None:
    """Measure each number of engines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, nargs="+", default=[1])
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--executor", default=None)
    parser.add_argument("--locations", choices=sorted(OURS), default="stop")
    parser.add_argument("--prompts", type=int, default=1024, help="for each engine")
    parser.add_argument("--ring-bytes", type=int, default=16 << 30)
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--disk", default=None)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    for engines in options.engines:
        line = json.dumps({"system": "fleet", **measure(options, engines)})
        print("RESULT", line, flush=True)
        if options.out:
            with options.out.open("a") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
