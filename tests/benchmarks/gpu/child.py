"""One system in a process of its own: starts it, says so, then runs a workload for each line of its input.

A line is JSON: {"workload": …, "seed": …, "warm_up": …, "profile": …}. Answers are JSON on lines that begin with `@@`,
since libraries print what they like.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
import traceback
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
# Functions are sent to the ranks of tensor-parallel engines.
os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")

from tests.benchmarks.gpu.device_time import DeviceTime
from tests.benchmarks.gpu.shapes import WORKLOADS, shrunk, warm_up

# Name -> class, locations, stop early.
OURS = {
    "one": ("residual.18", False),
    "four": ("residual.8,residual.17,residual.26,residual.35", False),
    "all": ("residual.*", False),
    "stop": ("residual.17", True),
}
PEERS = {
    "hf": "HuggingFace",
    "extract": "Extraction",
    "nnsight": "NNsight",
    "hook": "Hook",
    "blocks": "Blocks",
    "blocks-eager": "Blocks",
}


def say(**fields: Any) -> None:
    """One answer."""
    print("@@" + json.dumps(fields), flush=True)


def build(options: argparse.Namespace) -> Any:
    """Start the system that `options.system` names."""
    from tests.benchmarks.gpu import peers, systems

    if options.system in ("plain", "plain-mp"):
        # The engine in this process, or in one of its own as vLLM has it by default.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(options.system == "plain-mp"))
        return systems.Plain(options)
    if options.system in PEERS:
        options.eager = options.eager or options.system == "blocks-eager"
        return getattr(peers, PEERS[options.system])(options)
    options.locations, options.stop = OURS[options.system]
    if options.small:
        options.locations = {"one": "residual.1", "stop": "residual.1", "four": "residual.0,residual.3"}.get(
            options.system, options.locations
        )
    return systems.Ours(options)


def memory() -> dict[str, int]:
    """Peaks of this process: device memory of the last workload, host memory since its start."""
    import torch

    device = torch.cuda.max_memory_reserved() if torch.cuda.is_available() else 0
    return {
        "device_peak_bytes": device,
        "host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def main() -> None:
    """Start, then serve."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("system")
    add_options(parser)
    options = parser.parse_args()
    options.verify_seed = 1
    try:
        begun = time.monotonic()
        system = build(options)
        say(ready=True, start_s=time.monotonic() - begun)
        for line in sys.stdin:
            command = json.loads(line)
            serve(system, command, options)
    except BaseException as error:
        traceback.print_exc()
        say(error=f"{type(error).__name__}: {error}"[:500])
    # An engine's tear-down is not what is measured.
    os._exit(0)


def serve(system: Any, command: dict[str, Any], options: argparse.Namespace) -> None:
    """Run one workload and say what came out."""
    import torch

    workload = WORKLOADS[command["workload"]]
    if options.small:
        workload = shrunk(workload)
    if command.get("warm_up"):
        workload = warm_up(workload)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    device_time = DeviceTime() if command.get("profile") else None
    if device_time is not None:
        with device_time:
            results = system.run(workload, command["seed"])
        results["device"] = device_time.summary()
    else:
        results = system.run(workload, command["seed"])
    n_tokens = workload.n_tokens
    say(**results, tok_s=n_tokens / results["seconds"], n_tokens=n_tokens, **memory())


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options that sitting and child share."""
    parser.add_argument("--small", action="store_true", help="dry run on a CPU")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--executor", default="mp")
    parser.add_argument("--kv-gib", type=float, default=6.0)
    parser.add_argument("--ring-bytes", type=int, default=16 << 30)
    parser.add_argument("--writer-threads", type=int, default=8)
    parser.add_argument("--rows-per-shard", type=int, default=32768)
    parser.add_argument("--disk", default=None, help="folder for run folders")


if __name__ == "__main__":
    main()
