"""What users do today: transformers with a hook, an eager vLLM with a hook, vLLM's own extraction, nnsight; and our
blocks.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from tests.benchmarks.gpu.shapes import Workload, make_model_folder, make_prompts
from tests.benchmarks.gpu.systems import SAMPLING, max_model_len, vllm_arguments


class HuggingFace:
    """transformers' forward with a hook that copies one layer's output to the host; no head, no cache."""

    BATCH = 8

    def __init__(self, options: Namespace) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        folder, self.config = make_model_folder(options.small)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        with torch.device(self.device):
            self.model = AutoModelForCausalLM.from_config(
                AutoConfig.from_pretrained(folder), dtype=torch.bfloat16, attn_implementation="sdpa"
            ).eval()
        self.kept: list[Any] = []
        layer = self.model.model.layers[1 if options.small else 18]
        layer.register_forward_hook(
            lambda module, arguments, output: self.kept.append(
                (output[0] if isinstance(output, tuple) else output).to("cpu")
            )
        )

    def run(self, workload: Workload, seed: int) -> dict[str, Any]:
        """Batches of eight prompts of one length: no padding."""
        import torch

        prompts = torch.tensor(make_prompts(workload, self.config["vocab_size"], seed), device=self.device)
        begun = time.monotonic()
        with torch.inference_mode():
            for start in range(0, len(prompts), self.BATCH):
                self.kept.clear()
                self.model.model(prompts[start : start + self.BATCH], use_cache=False)
        return {"seconds": time.monotonic() - begun, "batch": self.BATCH}


class Extraction:
    """vLLM's `extract_hidden_states`: one layer, a file for each prompt, complete and synced."""

    def __init__(self, options: Namespace) -> None:
        # As a user would run it: a separate engine process, and the runner that has this method.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        from vllm import LLM

        folder, self.config = make_model_folder(options.small)
        self.folder = Path(tempfile.mkdtemp(prefix="extracted-", dir=options.disk))
        layer = 1 if options.small else 18
        arguments: dict[str, Any] = {
            **vllm_arguments(options),
            "speculative_config": {
                "method": "extract_hidden_states",
                "num_speculative_tokens": 1,
                # Layers already applied, so that this is the stream after `layer`.
                "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [layer + 1]}},
            },
            "kv_transfer_config": {
                "kv_connector": "ExampleHiddenStatesConnector",
                "kv_role": "kv_producer",
                "kv_connector_extra_config": {"shared_storage_path": str(self.folder)},
            },
        }
        self.llm = LLM(
            model=str(folder),
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_model_len=max_model_len(options),
            disable_log_stats=True,
            dtype=self.config["torch_dtype"],
            **arguments,
        )

    def run(self, workload: Workload, seed: int) -> dict[str, Any]:
        """Seconds until all files are complete and the disk has them; `generate_s` until the call returned."""
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=1, detokenize=False, **SAMPLING)
        prompts: Any = [{"prompt_token_ids": ids} for ids in make_prompts(workload, self.config["vocab_size"], seed)]
        begun = time.monotonic()
        outputs = self.llm.generate(prompts, sampling, use_tqdm=False)
        generate_s = time.monotonic() - begun
        paths = [Path(output.kv_transfer_params["hidden_states_path"]) for output in outputs]
        n_complete = _wait_for_files(paths, limit_s=60)
        os.sync()
        seconds = time.monotonic() - begun
        n_bytes = sum(path.stat().st_size for path in paths if path.exists())
        for path in self.folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        return {"seconds": seconds, "generate_s": generate_s, "n_complete": n_complete, "stored_bytes": n_bytes}


def _wait_for_files(paths: list[Path], *, limit_s: float) -> int:
    """Number of files whose writer has given its lock back in time."""
    deadline = time.monotonic() + limit_s
    left = set(paths)
    while left and time.monotonic() < deadline:
        left = {path for path in left if not _is_complete(path)}
        if left:
            time.sleep(0.005)
    return len(paths) - len(left)


def _is_complete(path: Path) -> bool:
    try:
        with open(f"{path}.lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (BlockingIOError, FileNotFoundError):
        return False
    return path.exists()


class NNsight:
    """nnsight's installed edit that ends in `.cpu()`."""

    def __init__(self, options: Namespace) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        from nnsight.modeling.vllm import VLLM

        folder, self.config = make_model_folder(options.small)
        arguments = vllm_arguments(options)
        arguments.pop("compilation_config", None)
        self.model = VLLM(
            str(folder),
            dispatch=True,
            enable_prefix_caching=False,
            max_model_len=max_model_len(options),
            disable_log_stats=True,
            **arguments,
        )
        layer = self.model.model.layers[1 if options.small else 18]
        # nnsight reads this body's source, so it stands here as a user would write it.
        with self.model.edit() as (tracer, edit):  # noqa: RUF059
            out = layer.output
            hidden = (out[0] + out[1]).cpu().save()  # noqa: F841
        self.edit = edit

    def run(self, workload: Workload, seed: int) -> dict[str, Any]:
        """One call for all prompts; the values are there when it returns."""
        prompts = [{"prompt_token_ids": ids} for ids in make_prompts(workload, self.config["vocab_size"], seed)]
        begun = time.monotonic()
        outputs = self.model.generate(prompts, detokenize=False, max_tokens=1, **SAMPLING)
        rows = [output.saves["hidden"] for output in outputs]
        seconds = time.monotonic() - begun
        assert len(rows) == len(prompts) and len(rows[0]) == workload.length
        return {"seconds": seconds}


class Hook:
    """An eager vLLM with a hook that copies one layer's rows of each step to the host and waits for them."""

    def __init__(self, options: Namespace) -> None:
        from vllm import LLM

        folder, self.config = make_model_folder(options.small)
        arguments = vllm_arguments(options)
        arguments.pop("compilation_config", None)
        self.llm = LLM(
            model=str(folder),
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_model_len=max_model_len(options),
            disable_log_stats=True,
            dtype=self.config["torch_dtype"],
            **{**arguments, "enforce_eager": True},
        )
        self.kept: list[Any] = []
        model = self.llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()
        model.model.layers[1 if options.small else 18].register_forward_hook(
            lambda module, arguments, output: self.kept.append((output[0] + output[1]).cpu())
        )

    def run(self, workload: Workload, seed: int) -> dict[str, Any]:
        """All prompts in one call; the rows are there when it returns, not yet told apart by request."""
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=workload.max_tokens, detokenize=False, **SAMPLING)
        prompts: Any = [{"prompt_token_ids": ids} for ids in make_prompts(workload, self.config["vocab_size"], seed)]
        self.kept.clear()
        begun = time.monotonic()
        self.llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.monotonic() - begun
        assert sum(len(rows) for rows in self.kept) >= workload.n_tokens
        return {"seconds": seconds}


class Blocks:
    """Our blocks: every request keeps one layer's rows of each step, on the host."""

    def __init__(self, options: Namespace) -> None:
        from harvest import VLLM

        folder, self.config = make_model_folder(options.small)
        arguments = vllm_arguments(options)
        arguments.pop("compilation_config", None)
        arguments.pop("enforce_eager", None)
        self.model = VLLM(
            folder,
            dispatch=True,
            max_model_len=max_model_len(options),
            dtype=self.config["torch_dtype"],
            **arguments,
            **({"enforce_eager": True} if options.eager else {}),
        )
        self.layer = 1 if options.small else 18

    def run(self, workload: Workload, seed: int) -> dict[str, Any]:
        """With the block, and the same engine without it."""
        prompts = make_prompts(workload, self.config["vocab_size"], seed)
        sampling: dict[str, Any] = {**SAMPLING, "max_tokens": workload.max_tokens}
        begun = time.monotonic()
        self.model.generate(prompts, **sampling)
        plain_s = time.monotonic() - begun
        layer = self.layer

        def keep_rows(model: Any, tracer: Any) -> list[Any]:
            module = model.model.layers[layer]
            return [hidden + residual for hidden, residual in (module.output for _ in tracer.all())]

        begun = time.monotonic()
        results = self.model.run(keep_rows, prompts, **sampling)
        seconds = time.monotonic() - begun
        assert len(results) == len(prompts)
        assert [len(rows) for rows in results[0].value] == [workload.length, *[1] * (workload.max_tokens - 1)]
        graphs = self._graphs()
        return {
            "seconds": seconds,
            "same_engine_without_block_s": plain_s,
            "layers_launched": graphs.n_replays,
            "layers_refused": len(graphs.refusals),
        }

    def _graphs(self) -> Any:
        executor = self.model.engine._engine.model_executor
        return executor.driver_worker.worker.model_runner.blocks.graphs
