"""Plain vLLM and ours: a system is started once, then runs workloads, one at a time, and times each."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from argparse import Namespace
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from tests.benchmarks.gpu.shapes import Workload, make_model_folder, make_prompts, scale_weights

# Passes of other sizes are padded to the next of these; prefill steps are larger and run without a graph anyway.
CAPTURE_SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
SAMPLING = {"temperature": 0.0, "ignore_eos": True}


class System(Protocol):
    """Something that runs workloads."""

    def run(self, workload: Workload, seed: int) -> dict[str, Any]:
        """Run one; `seconds` is among the results."""
        ...


def vllm_arguments(options: Namespace) -> dict[str, Any]:
    """What every vLLM engine runs with."""
    arguments: dict[str, Any] = {
        "load_format": "dummy",
        "max_num_batched_tokens": 512 if options.small else 8192,
        "max_num_seqs": 64 if options.small else 256,
        "kv_cache_memory_bytes": 1 << 28 if options.small else int(options.kv_gib * (1 << 30)),
    }
    if options.eager or options.small:
        arguments["enforce_eager"] = True
    else:
        arguments["compilation_config"] = {"cudagraph_capture_sizes": CAPTURE_SIZES}
    if not options.small:
        # Memory is given by kv_cache_memory_bytes; this is only checked against what is free at the start.
        arguments["gpu_memory_utilization"] = 0.1
    return arguments


def max_model_len(options: Namespace) -> int:
    """Of every engine."""
    return 256 if options.small else 2048


class Plain:
    """Plain vLLM at its fastest settings, in-process."""

    def __init__(self, options: Namespace) -> None:
        from vllm import LLM

        folder, self.config = make_model_folder(options.small)
        tp = {"distributed_executor_backend": options.executor} if options.tp > 1 else {}
        self.llm = LLM(
            model=str(folder),
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_model_len=max_model_len(options),
            disable_log_stats=True,
            dtype=self.config["torch_dtype"],
            tensor_parallel_size=options.tp,
            **tp,
            **vllm_arguments(options),
        )
        self.llm.llm_engine.collective_rpc(scale_weights)

    def run(self, workload: Workload, seed: int) -> dict[str, Any]:
        """All prompts in one call of `generate`."""
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=workload.max_tokens, detokenize=False, **SAMPLING)
        prompts: Any = [{"prompt_token_ids": ids} for ids in make_prompts(workload, self.config["vocab_size"], seed)]
        begun = time.monotonic()
        self.llm.generate(prompts, sampling, use_tqdm=False)
        return {"seconds": time.monotonic() - begun}


class Ours:
    """The product's path: planned run, feeder, engine with taps, sink, run folder, commit."""

    def __init__(self, options: Namespace) -> None:
        from actors.protocol import EngineSpec
        from actors.selection import Selection
        from actors.worker.llm import Llm
        from actors.worker.locations import resolve_locations
        from actors.worker.tree import build_model_tree
        from tests.harness import make_run

        self.options = options
        folder, self.config = make_model_folder(options.small)
        self.locations = resolve_locations(
            build_model_tree(str(folder), dtype=self.config["torch_dtype"]), options.locations.split(",")
        )
        self.root = Path(tempfile.mkdtemp(prefix="harvest-bench-", dir=options.disk))
        # The engine wants a layout at its start; each workload brings its own afterwards.
        first = make_run(self.root / "first", [[1, 2, 3]], self.locations, dtype=self.store_dtype)
        self.spec = EngineSpec(
            run_path=str(first.path),
            model=str(folder),
            locations=tuple(location.name for location in self.locations),
            layout=first.layout,
            selection=Selection(),
            sampling=SAMPLING,
            dtype=self.config["torch_dtype"],
            max_model_len=max_model_len(options),
            tensor_parallel_size=options.tp,
            ring_bytes=options.ring_bytes,
            writer_threads=options.writer_threads,
            stop_early=options.stop,
            vllm={
                **vllm_arguments(options),
                **({"distributed_executor_backend": options.executor} if options.tp > 1 else {}),
            },
        )
        self.llm = Llm(self.spec)
        self.llm.call(scale_weights)  # type: ignore[arg-type]

    @property
    def store_dtype(self) -> Any:
        """Of the rows."""
        return "bfloat16" if self.config["torch_dtype"] == "bfloat16" else "float32"

    def run(self, workload: Workload, seed: int) -> dict[str, Any]:
        """Plan a run, bind the engine to it, and time it from the first lease to the last commit."""
        from actors.feeder import Feeder, read_planned
        from actors.protocol import Lease, UnitFailure
        from storage.commit import Committer
        from storage.verify import verify

        run, spec = self._plan(workload, seed)
        self.llm.call(partial(_bind, spec=spec))  # type: ignore[arg-type]
        self.llm._spec = spec
        feeder = Feeder(self.llm, spec, partial(read_planned, run.plan, unit_rows=run.layout.unit_rows))
        thread = threading.Thread(target=feeder.run, daemon=True)
        thread.start()
        receipts = []
        publish_s = 0.0
        with Committer.open(run) as committer:
            begun = time.monotonic()
            futures = [
                feeder.submit(Lease(unit=unit, attempt=committer.next_attempt(unit)))
                for unit in range(run.layout.n_units)
            ]
            for future in futures:
                receipt = future.result(600)
                assert not isinstance(receipt, UnitFailure), receipt.traceback
                receipts.append(receipt)
                if receipt.storage is not None:
                    ready = time.monotonic()
                    refused = committer.publish([receipt.storage]).refused
                    assert not refused, refused
                    publish_s += time.monotonic() - ready
            seconds = time.monotonic() - begun
            if workload.sink == "disk":
                committer.finalise()
        feeder.stop()
        thread.join()
        results: dict[str, Any] = {
            "seconds": seconds,
            "stored_bytes": sum(receipt.stored_bytes for receipt in receipts),
            "seal_s": [round(receipt.seal_s, 3) for receipt in receipts],
            "publish_s": round(publish_s, 3),
            "stages_s": {
                name: round(value, 3)
                for name, value in asdict(feeder.stats.profile).items()
                if name.endswith("_s") and value >= 0.001
            },
            "n_layers_run": feeder.stats.n_layers_run,
        }
        if workload.sink == "disk" and seed == self.options.verify_seed:
            report = verify(run.path)
            assert report.ok, report
            results["verified"] = True
        shutil.rmtree(run.path)
        return results

    def _plan(self, workload: Workload, seed: int) -> tuple[Any, Any]:
        from actors.selection import Selection
        from tests.harness import make_run

        prompts = make_prompts(workload, self.config["vocab_size"], seed)
        selection = Selection(source="generated" if workload.max_tokens > 1 else "prompt", exact_length=True)
        per_unit = -(-len(prompts) // workload.n_units)
        n_units = -(-len(prompts) // per_unit)
        # make_run deals prompts to units in turn: hand them over transposed, so that neighbours share a unit.
        order = [unit * per_unit + index for index in range(per_unit) for unit in range(n_units)]
        run = make_run(
            self.root / f"{workload.name}-{seed}",
            prompts,
            self.locations,
            n_units=n_units,
            selection=selection,
            max_tokens=workload.max_tokens,
            dtype=self.store_dtype,
            order=[index for index in order if index < len(prompts)],
            rows_per_shard=256 if self.options.small else self.options.rows_per_shard,
            unit_rows=per_unit * (workload.length if workload.max_tokens == 1 else workload.max_tokens),
        )
        spec = replace(
            self.spec,
            run_path=str(run.path),
            layout=run.layout,
            selection=selection,
            null_sink=workload.sink == "null",
        )
        return run, spec


def _bind(worker: Any, *, spec: Any) -> None:
    """Give a worker another run of the same locations."""
    worker.harvester._spec = spec
