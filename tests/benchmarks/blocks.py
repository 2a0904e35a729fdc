"""What blocks cost on a CPU: `python -m tests.benchmarks.blocks [--pairs N] [--json PATH]`.

1. An empty block against plain generate on SmolLM2, in interleaved pairs: the median of the pairs' ratios with a
   bootstrap 95 % interval. The pair's order alternates, so that drift hits both alike.
2. Microseconds per read and per edit: 64 requests read (or edit) every layer of a tiny model at every step, against
   the same requests with an empty block.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def interleaved(
    first: Callable[[], Any],
    second: Callable[[], Any],
    n_pairs: int,
    clock: Callable[[], float] = time.perf_counter,
) -> list[tuple[float, float]]:
    """Seconds of both by `clock`, run in turn; which one goes first alternates."""
    pairs = []
    for index in range(n_pairs):
        order = (first, second) if index % 2 == 0 else (second, first)
        seconds = {}
        for action in order:
            begin = clock()
            action()
            seconds[action] = clock() - begin
        pairs.append((seconds[first], seconds[second]))
    return pairs


def median_interval(values: Sequence[float], *, seed: int = 0) -> tuple[float, float, float]:
    """Median with a bootstrap 95 % interval."""
    rng = random.Random(seed)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(2000))
    return statistics.median(values), medians[50], medians[1949]


def empty_block_cost(model_path: str, n_pairs: int, prompts: Sequence[str], max_tokens: int) -> dict[str, Any]:
    """Ratio of a run with an empty block to plain generate, same prompts, same engine."""
    from harvest import VLLM

    with VLLM(model_path, dispatch=True, max_model_len=512, **_CPU) as model:
        sampling: dict[str, Any] = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True}

        def plain() -> None:
            model.generate(list(prompts), **sampling)

        def empty() -> None:
            model.run(_do_nothing, list(prompts), **sampling)

        plain(), empty()
        found: dict[str, Any] = {"pairs": n_pairs, "requests": len(prompts), "steps": max_tokens}
        # Processor seconds of this process beside wall time: other users of the machine disturb them less.
        for name, clock in (("wall", time.perf_counter), ("cpu", time.process_time)):
            pairs = interleaved(empty, plain, n_pairs, clock)
            ratio, low, high = median_interval([with_block / without for with_block, without in pairs])
            found[name] = {"ratio": ratio, "low": low, "high": high}
    return found


def access_cost(n_requests: int, n_layers: int, n_steps: int, n_pairs: int) -> dict[str, Any]:
    """Microseconds per read and per edit, from the difference to an empty block."""
    from harvest import VLLM
    from tests.tiny_models import make_tiny_model

    with tempfile.TemporaryDirectory() as folder:
        path = make_tiny_model("qwen3", Path(folder) / "model", layers=n_layers)
        with VLLM(path, dispatch=True, max_model_len=512, max_num_seqs=n_requests, **_CPU) as model:
            prompts = [[5, 6, 7, 8]] * n_requests
            sampling: dict[str, Any] = {"temperature": 0.0, "max_tokens": n_steps, "ignore_eos": True}
            accesses = n_requests * n_layers * n_steps
            found: dict[str, Any] = {"requests": n_requests, "layers": n_layers, "steps": n_steps}
            for name, block in (("read", _read_layers), ("edit", _edit_layers)):

                def with_block(block: Any = block) -> None:
                    model.run(block, prompts, **sampling)

                def empty() -> None:
                    model.run(_loop_only, prompts, **sampling)

                with_block(), empty()
                # The forward thread's own processor time: other processes on the machine do not count.
                pairs = interleaved(with_block, empty, n_pairs, clock=time.thread_time)
                cost, low, high = median_interval([(a - b) / accesses * 1e6 for a, b in pairs])
                found[f"{name}_us"] = cost
                found[f"{name}_in_switches"] = cost / switch_cost_us()
                found[f"{name}_us_interval"] = [low, high]
            return found


def switch_cost_us() -> float:
    """Microseconds for a bare greenlet switch there and back: what this machine gives at this moment."""
    from greenlet import getcurrent, greenlet

    def other() -> None:
        while True:
            getcurrent().parent.switch()

    target = greenlet(other)
    n_switches = 50_000
    begin = time.thread_time()
    for _ in range(n_switches):
        target.switch()
    return (time.thread_time() - begin) / n_switches * 1e6


def _do_nothing(model: Any) -> None:
    return None


def _loop_only(model: Any, tracer: Any) -> None:
    for _ in tracer.all():
        pass


def _read_layers(model: Any, tracer: Any) -> None:
    modules = [layer.mlp for layer in model.model.layers]
    for _ in tracer.all():
        for module in modules:
            _ = module.output


def _edit_layers(model: Any, tracer: Any) -> None:
    modules = [layer.mlp for layer in model.model.layers]
    for _ in tracer.all():
        for module in modules:
            module.output[:] = 0


_CPU: dict[str, Any] = {"dtype": "float32", "seed": 0}
_PROMPTS = [
    "The capital of France is",
    "Madison Square Garden is in the city of",
    "Water is made of hydrogen and",
    "The Eiffel Tower is in",
]


def main() -> None:
    """Run both parts and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    found = run_all(pairs=options.pairs, max_tokens=options.tokens)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2))


def run_all(*, pairs: int, max_tokens: int = 16) -> dict[str, Any]:
    """Both parts, printed as they come."""
    access = access_cost(n_requests=64, n_layers=16, n_steps=8, n_pairs=max(3, pairs // 3))
    for name in ("read", "edit"):
        low, high = access[f"{name}_us_interval"]
        print(
            f"one {name}: {access[f'{name}_us']:.1f} µs [{low:.1f}, {high:.1f}] of the forward thread, "
            f"{access[f'{name}_in_switches']:.1f} bare greenlet switches, "
            f"{access['requests']} requests × {access['layers']} layers × {access['steps']} steps"
        )
    from harvest.models import get_model

    empty = empty_block_cost(str(get_model("smollm2-135m")), pairs, _PROMPTS, max_tokens)
    for clock in ("wall", "cpu"):
        print(
            "empty block / plain generate, {clock}: {ratio:.4f} [{low:.4f}, {high:.4f}] ({pairs} pairs)".format(
                clock=clock, pairs=pairs, **empty[clock]
            )
        )
    return {"access": access, "empty_block": empty}


if __name__ == "__main__":
    main()
