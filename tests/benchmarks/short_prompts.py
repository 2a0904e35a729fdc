"""Prompts of few tokens on a CPU: `python -m tests.benchmarks.short_prompts [--pairs N] [--length N] [--json PATH]`.

A harvest (plan, feeder, taps, sink, fsync, commit) with the settings that Harvest chooses, against two others in
interleaved pairs in one process: the same with vLLM's library defaults and requests checked one by one, as it was
before, and plain vLLM `generate` with its own offline defaults. Medians of the pairs' ratios of speed with a bootstrap
95 % interval, and the profiles.
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

import numpy as np

from tests.benchmarks.blocks import interleaved, median_interval

UNITS = 4


def main() -> None:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--prompts", type=int, default=1024)
    parser.add_argument("--length", type=int, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = run_all(pairs=options.pairs, n_prompts=options.prompts, length=options.length)
    print(json.dumps(results, indent=1))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    # An engine's tear-down is not what is measured.
    os._exit(0)


def run_all(*, pairs: int, n_prompts: int, length: int) -> dict[str, Any]:
    """Speed as ratios to the others."""
    os.environ.update({"HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"})
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from harvest.models import get_model

    model = get_model("smollm2-135m")
    prompts = np.random.default_rng(0).integers(100, 40_000, (n_prompts, length)).tolist()
    rounds = pairs + 1
    ours, profile = make_ours(model, prompts, rounds=2 * rounds)
    before, profile_before = make_ours(model, prompts, rounds=rounds, as_before=True)
    plain = make_plain(model, prompts)
    results: dict[str, Any] = {"prompts": n_prompts, "length": length, "pairs": pairs}
    for name, other in (("before", before), ("plain generate", plain)):
        ours(), other()
        cpu: list[float] = []
        wall = interleaved(_also(ours, cpu), _also(other, cpu), pairs)
        # `interleaved` alternates which one goes first.
        in_turn = [cpu[i : i + 2] if i % 4 == 0 else cpu[i : i + 2][::-1] for i in range(0, len(cpu), 2)]
        results[name] = {
            "wall": median_interval([b / a for a, b in wall]),
            "cpu": median_interval([b / a for a, b in in_turn]),
        }
        print(name, results[name], flush=True)
    for name, of in (("profile", profile), ("profile before", profile_before)):
        results[name] = {**of().to_json(), "fullness": round(of().fullness, 3)}
    return results


def _also(action: Callable[[], None], cpu_s: list[float]) -> Callable[[], None]:
    """The same, with its CPU seconds appended to a list."""

    def timed() -> None:
        begun_s = time.process_time()
        action()
        cpu_s.append(time.process_time() - begun_s)

    return timed


def make_plain(model: Path, prompts: list[list[int]]) -> Callable[[], None]:
    """Plain vLLM with its own defaults, eager as CPU engines are here, the whole forward."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(model),
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=2048,
        disable_log_stats=True,
    )
    parameters = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)

    def run() -> None:
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], parameters, use_tqdm=False)

    return run


def make_ours(
    model: Path, prompts: list[list[int]], *, rounds: int, as_before: bool = False
) -> tuple[Callable[[], None], Callable[[], Any]]:
    """A harvest of all prompts, committed; each call takes the next units of one run. Also gives the profile."""
    from actors.feeder import Feeder, read_planned
    from actors.protocol import EngineSpec, Lease, UnitFailure
    from actors.selection import Selection
    from actors.worker.llm import Llm
    from actors.worker.locations import resolve_locations
    from actors.worker.tree import build_model_tree
    from storage.commit import Committer
    from tests.harness import make_run

    class CheckedOneByOne(Llm):
        """Parameters made, checked and copied deeply for each request."""

        def add(self, request: Any) -> None:
            self._parameters.clear()
            super().add(request)

        def _make_parameters(self, max_tokens: int) -> Any:
            parameters = super()._make_parameters(max_tokens)
            parameters.skip_clone = False
            return parameters

    locations = resolve_locations(build_model_tree(str(model)), ["residual.29"])
    per_unit = -(-len(prompts) // UNITS)
    n_units = UNITS * rounds
    run = make_run(
        Path(tempfile.mkdtemp(prefix="harvest-bench-")) / "run",
        prompts * rounds,
        locations,
        n_units=n_units,
        order=[unit * per_unit + index for index in range(per_unit) for unit in range(n_units)],
        dtype="bfloat16",
        rows_per_shard=1024,
        unit_rows=per_unit * len(prompts[0]),
    )
    spec = EngineSpec(
        run_path=str(run.path),
        model=str(model),
        locations=tuple(location.name for location in locations),
        layout=run.layout,
        selection=Selection(),
        sampling={"temperature": 0.0},
        max_model_len=2048,
        prompt_tokens=len(prompts[0]),
        vllm={"max_num_batched_tokens": 2048, "max_num_seqs": 128} if as_before else {},
    )
    llm = (CheckedOneByOne if as_before else Llm)(spec)
    feeder = Feeder(llm, spec, partial(read_planned, run.plan, unit_rows=run.layout.unit_rows))
    threading.Thread(target=feeder.run, daemon=True).start()
    committer = Committer.open(run)
    rounds_done = iter(range(rounds))

    def harvest() -> None:
        first = next(rounds_done) * UNITS
        futures = [
            feeder.submit(Lease(unit=unit, attempt=committer.next_attempt(unit)))
            for unit in range(first, first + UNITS)
        ]
        for future in futures:
            receipt = future.result()
            assert not isinstance(receipt, UnitFailure), receipt.traceback
            assert receipt.storage is not None
            assert not committer.publish([receipt.storage]).refused

    return harvest, lambda: feeder.stats.profile


if __name__ == "__main__":
    main()
