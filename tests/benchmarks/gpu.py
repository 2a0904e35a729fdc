"""GPU benchmark: the product's own path (plan, feeder, taps, sink, run folder) against plain vLLM in one sitting.

One case a process, since an engine does not give its memory back. Each prints JSON lines, appended to the file that
`--out` names:

    python tests/benchmarks/gpu.py plain --out r.jsonl
    python tests/benchmarks/gpu.py ours --locations residual.18 --sink null --out r.jsonl
    python tests/benchmarks/gpu.py ours --locations residual.17 --stop --sink disk --out r.jsonl
    python tests/benchmarks/gpu.py disk --out r.jsonl
    python tests/benchmarks/gpu.py table r.jsonl        a Markdown table of medians and ratios

The model has the shape of Qwen3-8B with dummy weights, scaled so that layers matter. `--small` is a dry run on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import numpy as np

QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "max_position_embeddings": 40960,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "use_cache": True,
    "use_sliding_window": False,
}
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 1024,
    "torch_dtype": "float32",
}
UNITS = 4


def model_folder(small: bool) -> tuple[Path, dict[str, Any]]:
    """A folder with nothing but the config."""
    config = {**QWEN3_8B, **(SMALL if small else {})}
    folder = Path(tempfile.mkdtemp(prefix="qwen3-shape-"))
    (folder / "config.json").write_text(json.dumps(config))
    return folder, config


def scale_weights(worker: Any) -> None:
    """Dummy weights are about 1e-3: give every layer a say in the residual stream. In place, so graphs stay valid."""
    import torch

    with torch.no_grad():
        for parameter in worker.model_runner.get_model().parameters():
            if parameter.dim() > 1:
                parameter.mul_(25.0)
            else:
                parameter.fill_(1.0)


def make_prompts(n: int, length: int, vocabulary: int, seed: int = 0) -> list[list[int]]:
    """Random token ids."""
    return np.random.default_rng(seed).integers(10, vocabulary - 10, (n, length)).tolist()


def vllm_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """What both sides run with."""
    arguments: dict[str, Any] = {
        "load_format": "dummy",
        "max_num_batched_tokens": options.step_tokens,
        "max_num_seqs": 256,
        "enforce_eager": options.eager,
    }
    if options.small:
        arguments["kv_cache_memory_bytes"] = 1 << 28
    else:
        arguments["gpu_memory_utilization"] = options.memory
    return arguments


def gpu_memory_bytes() -> int:
    """Used memory of the card."""
    import torch

    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def host_memory_bytes() -> int:
    """Peak resident size of this process."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def report(options: argparse.Namespace, **fields: Any) -> None:
    """One result line."""
    line = json.dumps({"case": options.case_name, **fields})
    print("RESULT", line, flush=True)
    if options.out:
        with open(options.out, "a") as out:
            out.write(line + "\n")


def run_plain(options: argparse.Namespace) -> None:
    """Plain vLLM at its fastest settings, in-process."""
    from vllm import LLM, SamplingParams

    folder, config = model_folder(options.small)
    begun = time.monotonic()
    llm = LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=options.max_model_len,
        disable_log_stats=True,
        dtype=config["torch_dtype"],
        **vllm_arguments(options),
    )
    llm.llm_engine.collective_rpc(scale_weights)
    start_s = time.monotonic() - begun
    parameters = SamplingParams(max_tokens=options.max_tokens, temperature=0.0, detokenize=False, ignore_eos=True)

    def once(seed: int, n: int) -> float:
        prompts = [{"prompt_token_ids": p} for p in make_prompts(n, options.length, config["vocab_size"], seed)]
        begun = time.monotonic()
        llm.generate(prompts, parameters, use_tqdm=False)
        return time.monotonic() - begun

    once(99, max(1, options.prompts // 4))
    for repeat in range(options.repeats):
        seconds = once(repeat, options.prompts)
        report(options, kind="plain", seconds=seconds, start_s=start_s, **rates(options, seconds))
    finish(options)


def rates(options: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Tokens a second: of prompts, and generated ones where there are any."""
    n_tokens = options.prompts * (options.length if options.max_tokens == 1 else options.max_tokens)
    return {
        "tok_s": n_tokens / seconds,
        "gpu_bytes": gpu_memory_bytes(),
        "host_peak_bytes": host_memory_bytes(),
        "prompts": options.prompts,
        "length": options.length,
        "max_tokens": options.max_tokens,
    }


def run_ours(options: argparse.Namespace) -> None:
    """The product: a planned run through the feeder, taps and sink."""
    from actors.feeder import Feeder, read_planned
    from actors.protocol import EngineSpec
    from actors.selection import Selection
    from actors.worker.llm import Llm
    from actors.worker.locations import resolve_locations
    from actors.worker.tree import build_model_tree
    from tests.harness import make_run

    folder, config = model_folder(options.small)
    tree = build_model_tree(str(folder), dtype=config["torch_dtype"])
    locations = resolve_locations(tree, options.locations.split(","))
    del tree
    selection = Selection(source="generated" if options.max_tokens > 1 else "prompt", exact_length=True)
    dtype = "bfloat16" if config["torch_dtype"] == "bfloat16" else "float32"
    root = Path(tempfile.mkdtemp(prefix="harvest-bench-", dir=options.disk))
    # One run holds the units of all repeats: the engine is bound to it.
    n_rounds = options.repeats + 1
    prompts = [
        prompt
        for seed in range(n_rounds)
        for prompt in make_prompts(options.prompts, options.length, config["vocab_size"], seed)
    ]
    per_unit = max(1, options.prompts // UNITS)
    run = make_bench_run(root / "run", prompts, locations, selection, options, dtype, per_unit, make_run)
    spec = EngineSpec(
        run_path=str(run.path),
        model=str(folder),
        locations=tuple(location.name for location in locations),
        layout=run.layout,
        selection=selection,
        sampling={"temperature": 0.0, "ignore_eos": True},
        generates=False,
        dtype=config["torch_dtype"],
        max_model_len=options.max_model_len,
        ring_bytes=options.ring_bytes,
        writer_threads=options.writer_threads,
        null_sink=options.sink == "null",
        stop_early=options.stop,
        vllm=vllm_arguments(options),
    )
    begun = time.monotonic()
    llm = Llm(spec)
    llm.call(scale_weights)  # type: ignore[arg-type]
    start_s = time.monotonic() - begun

    read_unit = partial(read_planned, run.plan, unit_rows=run.layout.unit_rows)

    feeder = Feeder(llm, spec, read_unit)
    threading.Thread(target=feeder.run, daemon=True).start()
    measure_rounds(options, run, feeder, locations, start_s)
    feeder.stop()
    time.sleep(1)
    shutil.rmtree(root, ignore_errors=True)
    finish(options)


def make_bench_run(
    path: Path,
    prompts: Sequence[Sequence[int]],
    locations: Sequence[Any],
    selection: Any,
    options: argparse.Namespace,
    dtype: str,
    per_unit: int,
    make_run: Any,
) -> Any:
    """Consecutive prompts share a unit, `UNITS` units a round."""
    n_units = -(-len(prompts) // per_unit)
    # make_run deals prompts to units in turn, so hand them over transposed.
    order = [unit * per_unit + index for index in range(per_unit) for unit in range(n_units)]
    return make_run(
        path,
        prompts,
        locations,
        n_units=n_units,
        selection=selection,
        max_tokens=options.max_tokens,
        dtype=dtype,
        order=order,
        rows_per_shard=options.rows_per_shard,
        unit_rows=per_unit * (options.length if options.max_tokens == 1 else options.max_tokens),
    )


def measure_rounds(
    options: argparse.Namespace, run: Any, feeder: Any, locations: Sequence[Any], start_s: float
) -> None:
    """One warm-up round, then the timed ones; with a disk sink each unit is committed inside the time."""
    from actors.protocol import Lease, UnitFailure
    from storage.commit import Committer

    units = run.layout.n_units // (options.repeats + 1)
    with Committer.open(run) as committer:
        for round_number in range(options.repeats + 1):
            before = feeder.stats
            begun = time.monotonic()
            futures = [
                feeder.submit(Lease(unit=unit, attempt=committer.next_attempt(unit)))
                for unit in range(round_number * units, (round_number + 1) * units)
            ]
            receipts = []
            for future in futures:
                receipt = future.result(600)
                assert not isinstance(receipt, UnitFailure), receipt.traceback
                receipts.append(receipt)
                if receipt.storage is not None:
                    refused = committer.publish([receipt.storage]).refused
                    assert not refused, refused
            seconds = time.monotonic() - begun
            n_bytes = sum(receipt.stored_bytes for receipt in receipts)
            if round_number:
                report(
                    options,
                    kind="ours",
                    seconds=seconds,
                    start_s=start_s,
                    n_locations=len(locations),
                    sink=options.sink,
                    stop=options.stop,
                    stored_bytes=n_bytes,
                    gb_s=n_bytes / seconds / 1e9,
                    n_steps=feeder.stats.n_steps - before.n_steps,
                    seal_s=[round(receipt.seal_s, 2) for receipt in receipts],
                    gated_s=round(feeder.stats.gated_s - before.gated_s, 2),
                    n_layers_run=feeder.stats.n_layers_run,
                    **rates(options, seconds),
                )
            if options.sink == "disk" and options.delete:
                for receipt in receipts:
                    for file in receipt.storage.files:
                        (run.data / run.layout.arrays[file.array].file(file.shard)).unlink()


def run_disk(options: argparse.Namespace) -> None:
    """The disk's raw write rate: one thread for each file of 256 MiB, fsynced."""
    from concurrent.futures import ThreadPoolExecutor

    block = np.random.default_rng(0).bytes(16 << 20)
    root = Path(tempfile.mkdtemp(prefix="harvest-disk-", dir=options.disk))

    def write(number: int) -> None:
        fd = os.open(root / f"{number}", os.O_WRONLY | os.O_CREAT)
        for _ in range(16):
            os.write(fd, block)
        os.fsync(fd)
        os.close(fd)

    n_files = 4 if options.small else 32
    for _ in range(options.repeats):
        begun = time.monotonic()
        with ThreadPoolExecutor(options.writer_threads) as pool:
            list(pool.map(write, range(n_files)))
        seconds = time.monotonic() - begun
        report(options, kind="disk", seconds=seconds, gb_s=n_files * (256 << 20) / seconds / 1e9)
        for path in root.iterdir():
            path.unlink()
    shutil.rmtree(root)


def run_hf(options: argparse.Namespace) -> None:
    """What users do today: transformers' forward with a hook that copies to the host."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder, config = model_folder(options.small)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder), dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()
    kept = {}

    def hook(module: Any, arguments: Any, output: Any) -> None:
        kept["rows"] = (output[0] if isinstance(output, tuple) else output).to("cpu")

    model.model.layers[1 if options.small else 18].register_forward_hook(hook)
    size = 8
    prompts = torch.tensor(make_prompts(options.prompts, options.length, config["vocab_size"]), device=device)
    for repeat in range(options.repeats + 1):
        begun = time.monotonic()
        with torch.inference_mode():
            for start in range(0, len(prompts), size):
                model.model(prompts[start : start + size], use_cache=False)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds = time.monotonic() - begun
        if repeat:
            report(options, kind="hf", seconds=seconds, batch=size, **rates(options, seconds))


def print_table(paths: list[str]) -> None:
    """Medians by case, and the ratio to the plain case of the same shape."""
    results: dict[str, list[dict[str, Any]]] = {}
    for path in paths:
        for line in Path(path).read_text().splitlines():
            row = json.loads(line)
            results.setdefault(row["case"], []).append(row)
    plain = {
        (rows[0]["length"], rows[0]["max_tokens"]): statistics.median(row["tok_s"] for row in rows)
        for rows in results.values()
        if rows[0]["kind"] == "plain"
    }
    print(
        "| case | tok/s (median) | ratio to plain | GB/s | card memory GB | host peak GB |\n|---|---|---|---|---|---|"
    )
    for case, rows in results.items():
        first = rows[0]
        if "tok_s" not in first:
            print(f"| {case} | | | {statistics.median(r['gb_s'] for r in rows):.2f} | | |")
            continue
        tok_s = statistics.median(row["tok_s"] for row in rows)
        base = plain.get((first["length"], first["max_tokens"]))
        ratio = f"{tok_s / base:.3f}" if base else ""
        gb_s = f"{statistics.median(r['gb_s'] for r in rows):.2f}" if "gb_s" in first else ""
        print(
            f"| {case} | {tok_s:,.0f} | {ratio} | {gb_s} | {max(r['gpu_bytes'] for r in rows) / 1e9:.1f} | "
            f"{max(r['host_peak_bytes'] for r in rows) / 1e9:.1f} |"
        )


def finish(options: argparse.Namespace) -> None:
    """Leave at once: an engine's tear-down takes seconds of the lease."""
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    """Parse and run one case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["plain", "ours", "disk", "hf", "table"])
    parser.add_argument("paths", nargs="*")
    parser.add_argument("--name", default="")
    parser.add_argument("--locations", default="residual.18")
    parser.add_argument("--sink", choices=["null", "disk"], default="null")
    parser.add_argument("--stop", action="store_true", help="stop after the last wanted layer")
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--max-tokens", type=int, default=1)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--step-tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rows-per-shard", type=int, default=32768)
    parser.add_argument("--ring-bytes", type=int, default=16 << 30)
    parser.add_argument("--writer-threads", type=int, default=8)
    parser.add_argument("--memory", type=float, default=0.85)
    parser.add_argument("--disk", default=None, help="folder for run folders")
    parser.add_argument("--delete", action="store_true", help="delete each round's shards after it")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    if options.kind == "table":
        print_table(options.paths)
        return
    if options.small:
        options.prompts, options.length, options.step_tokens = 8, 64, 512
        options.max_model_len, options.eager, options.rows_per_shard = 256, True, 256
        options.locations = options.locations.replace("18", "1").replace("17", "1")
    options.case_name = options.name or " ".join(sys.argv[1:])
    {"plain": run_plain, "ours": run_ours, "disk": run_disk, "hf": run_hf}[options.kind](options)


if __name__ == "__main__":
    main()
