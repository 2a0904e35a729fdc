"""What all systems of a sitting share: the model's shape, its weights, prompts and workloads."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

QWEN3_8B: dict[str, Any] = {
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
# The same, small enough for a dry run on a CPU.
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 1024,
    "torch_dtype": "float32",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """One thing that is timed."""

    name: str
    n_prompts: int
    length: int
    """Prompt tokens of each."""
    max_tokens: int = 1
    sink: str = "null"
    """`disk`: rows go to a run folder, fsynced and committed. `null`: they are dropped in host memory."""
    n_units: int = 4

    @property
    def n_tokens(self) -> int:
        """Tokens that count: generated ones where more than one is generated, else those of the prompts."""
        return self.n_prompts * (self.length if self.max_tokens == 1 else self.max_tokens)


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(name="prefill", n_prompts=512, length=1024),
        Workload(name="prefill-disk", n_prompts=512, length=1024, sink="disk"),
        Workload(name="short", n_prompts=4096, length=128),
        Workload(name="short-disk", n_prompts=4096, length=128, sink="disk"),
        Workload(name="few-disk", n_prompts=64, length=1024, sink="disk"),
        Workload(name="decode", n_prompts=64, length=32, max_tokens=64, n_units=1),
        Workload(name="decode-disk", n_prompts=64, length=32, max_tokens=64, n_units=1, sink="disk"),
    )
}


def shrunk(workload: Workload) -> Workload:
    """For dry runs."""
    return replace(workload, n_prompts=8, length=min(workload.length, 48), max_tokens=min(workload.max_tokens, 4))


def warm_up(workload: Workload) -> Workload:
    """A quarter of it; all of it where the number of requests is the shape of a step."""
    if workload.max_tokens > 1:
        return workload
    return replace(workload, n_prompts=max(workload.n_units, workload.n_prompts // 4))


def make_model_folder(small: bool) -> tuple[Path, dict[str, Any]]:
    """A folder with a config and a three-word tokenizer, no weights."""
    config = {**QWEN3_8B, **(SMALL if small else {})}
    folder = Path(tempfile.mkdtemp(prefix="qwen3-shape-"))
    (folder / "config.json").write_text(json.dumps(config))
    words = {"<unk>": 0, "<bos>": 1, "<eos>": 2}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {
                "id": index,
                "content": word,
                "special": True,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
            }
            for word, index in words.items()
        ],
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "bos_token": "<bos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**names, "eos_token": "<eos>", "pad_token": "<eos>"}))
    return folder, config


def make_prompts(workload: Workload, vocabulary: int, seed: int) -> list[list[int]]:
    """Random token ids, other ones for each seed."""
    random = np.random.default_rng(seed)
    return random.integers(10, vocabulary - 10, (workload.n_prompts, workload.length)).tolist()


def scale_weights(worker: Any) -> None:
    """Dummy weights are about 1e-3: give every layer a say in the residual stream. In place, so graphs stay valid."""
    import torch

    with torch.no_grad():
        for parameter in worker.model_runner.get_model().parameters():
            if parameter.dim() > 1:
                parameter.mul_(25.0)
            else:
                parameter.fill_(1.0)
