"""What taps cost on a CPU: `python -m tests.benchmarks.taps [--pairs N] [--json PATH]`.

SmolLM2 in float32, the demo text, prompts only. A harvest to disk (plan, feeder, taps, sink, fsync, commit) against
plain
vLLM generate of the same settings, in interleaved pairs in one process: median of the pairs' ratios of speed with a
bootstrap 95 % interval, by wall clock and by CPU time.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.benchmarks.blocks import interleaved, median_interval

CASES = {
    "one location": (["residual.20"], False),
    "all layers": (["residual.*"], False),
    "stopping at half depth": (["residual.14"], True),
}
STEP_TOKENS = 2048


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = run_all(pairs=options.pairs, n_prompts=options.prompts)
    print(json.dumps(results, indent=1))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    # An engine's tear-down is not what is measured.
    os._exit(0)


def run_all(*, pairs: int, n_prompts: int = 20) -> dict[str, Any]:
    """Speed of each case as a ratio to plain generate."""
    os.environ.update({"HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"})
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from harvest.demo_text import make_demo_prompts
    from harvest.models import get_model

    model = get_model("smollm2-135m")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = [tokenizer(prompt.text)["input_ids"] for prompt in make_demo_prompts(n_prompts)]
    results: dict[str, Any] = {"prompts": len(prompts), "tokens": sum(map(len, prompts)), "pairs": pairs}
    plain = make_plain(model, prompts)
    for name, (locations, stop) in CASES.items():
        ours = make_ours(model, prompts, locations, stop=stop, rounds=2 * pairs + 2)
        ours(), plain()
        results[name] = {
            clock_name: median_interval([b / a for a, b in interleaved(ours, plain, pairs, clock)])
            for clock_name, clock in (("wall", time.perf_counter), ("cpu", time.process_time))
        }
        print(name, results[name], flush=True)
    return results


def vllm_arguments() -> dict[str, Any]:
    """What both sides run with."""
    return {"max_num_batched_tokens": STEP_TOKENS, "max_num_seqs": 32}


def make_plain(model: Path, prompts: list[list[int]]) -> Callable[[], None]:
    """Plain vLLM, eager as CPU engines are here."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(model),
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=2048,
        disable_log_stats=True,
        **vllm_arguments(),
    )
    parameters = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)

    def run() -> None:
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], parameters, use_tqdm=False)

    return run


def make_ours(
    model: Path, prompts: list[list[int]], names: list[str], *, stop: bool, rounds: int
) -> Callable[[], None]:
    """A harvest of all prompts in four units, committed; each call takes the next units of one run."""
    from actors.feeder import Feeder, read_planned
    from actors.protocol import EngineSpec, Lease, UnitFailure
    from actors.selection import Selection
    from actors.worker.llm import Llm
    from actors.worker.locations import resolve_locations
    from actors.worker.tree import build_model_tree
    from storage.commit import Committer
    from tests.harness import make_run

    locations = resolve_locations(build_model_tree(str(model)), names)
    units = 4
    per_unit = -(-len(prompts) // units)
    n_units = units * rounds
    repeated = [prompts[index % len(prompts)] for index in range(len(prompts) * rounds)]
    order = [unit * per_unit + index for index in range(per_unit) for unit in range(n_units)]
    run = make_run(
        Path(tempfile.mkdtemp(prefix="harvest-bench-")) / "run",
        repeated,
        locations,
        n_units=n_units,
        order=order,
        dtype="bfloat16",
        rows_per_shard=1024,
        unit_rows=2 * sum(map(len, prompts)) // units,
    )
    spec = EngineSpec(
        run_path=str(run.path),
        model=str(model),
        locations=tuple(location.name for location in locations),
        layout=run.layout,
        selection=Selection(),
        sampling={"temperature": 0.0},
        max_model_len=2048,
        stop_early=stop,
        vllm=vllm_arguments(),
    )
    feeder = Feeder(Llm(spec), spec, partial(read_planned, run.plan, unit_rows=run.layout.unit_rows))
    threading.Thread(target=feeder.run, daemon=True).start()
    committer = Committer.open(run)
    rounds_done = iter(range(rounds))

    def harvest() -> None:
        first = next(rounds_done) * units
        futures = [
            feeder.submit(Lease(unit=unit, attempt=committer.next_attempt(unit)))
            for unit in range(first, first + units)
        ]
        for future in futures:
            receipt = future.result()
            assert not isinstance(receipt, UnitFailure), receipt.traceback
            assert receipt.storage is not None
            assert not committer.publish([receipt.storage]).refused

    return harvest


if __name__ == "__main__":
    main()
