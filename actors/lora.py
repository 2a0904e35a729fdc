"""The LoRA adapter of a run: its folder (PEFT's format), its rank, its fingerprint, and what vLLM is told of it.

One adapter applies to every prompt of a run. Imports neither torch nor vLLM: a plan checks it before an engine starts.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The sizes for which vLLM has kernels (`vllm.config.lora.MaxLoRARanks`).
_VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_WEIGHT_FILES = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")


class AdapterError(ValueError):
    """An adapter that is not there or cannot be used."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """An adapter on this machine's disk."""

    name: str
    """How it is found again, on any machine: its absolute folder, or its Hugging Face id."""
    folder: Path
    config: dict[str, Any]
    """`adapter_config.json`."""
    weights: Path

    @property
    def rank(self) -> int:
        """Largest rank of its matrices."""
        return max(self.config["r"], *(self.config.get("rank_pattern") or {}).values(), 0)

    def scale(self, module: str) -> float:
        """The factor on the product of a module's two matrices, by PEFT's rules."""
        rank = _by_pattern(self.config.get("rank_pattern"), module, self.config["r"])
        alpha = _by_pattern(self.config.get("alpha_pattern"), module, self.config["lora_alpha"])
        return float(alpha / (rank**0.5 if self.config.get("use_rslora") else rank))

    def fingerprint(self) -> str:
        """sha256 (hex) over its configuration and weights."""
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        with self.weights.open("rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
        return digest.hexdigest()

    def check(self, planned: str | None) -> None:
        """Refuse an adapter that is not the planned one.

        Args:
            planned: its fingerprint when the run was planned; None: unknown, anything goes.

        Raises:
            AdapterError: says which, where, and what to do.
        """
        if planned is not None and self.fingerprint() != planned:
            raise AdapterError(
                f"the LoRA adapter {self.name} is not the one that the run was planned for: its bytes are others on "
                f"{os.uname().nodename}. Bring the old one back, or plan a new run under another store.path"
            )

    def engine_arguments(self) -> dict[str, Any]:
        """The arguments of `vllm.EngineArgs` that make room for this adapter and no other."""
        fitting = [size for size in _VLLM_RANKS if size >= self.rank]
        return {"enable_lora": True, "max_loras": 1, "max_lora_rank": fitting[0]}


def read_adapter(name: str) -> Adapter:
    """Find and check an adapter.

    Args:
        name: a local folder, or a Hugging Face id, which is downloaded into the hub's cache.

    Raises:
        AdapterError: there is none, or vLLM could not apply it as PEFT does.
    """
    folder = Path(name).expanduser().absolute()
    is_local = folder.is_dir()
    if not is_local:
        folder = _from_hub(name)
    try:
        config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise AdapterError(f"{name} is no LoRA adapter in PEFT's format: adapter_config.json: {error}") from error
    weights = next((folder / each for each in _WEIGHT_FILES if (folder / each).is_file()), None)
    if weights is None:
        raise AdapterError(f"{name} has no weights: none of {', '.join(_WEIGHT_FILES)} is there")
    problems = _problems(config)
    if problems:
        raise AdapterError(f"{name} cannot be applied by vLLM: {'; '.join(problems)}")
    return Adapter(name=str(folder) if is_local else name, folder=folder, config=config, weights=weights)


def _problems(config: dict[str, Any]) -> list[str]:
    found = []
    if config.get("peft_type", "LORA") != "LORA":
        return [f"it is a {config['peft_type']}, not a LoRA"]
    rank, ranks = config.get("r"), (config.get("rank_pattern") or {}).values()
    if not isinstance(rank, int) or not isinstance(config.get("lora_alpha"), int | float):
        return ["adapter_config.json has no r or no lora_alpha"]
    if not 0 < max(rank, *ranks, 0) <= _VLLM_RANKS[-1]:
        found.append(f"its rank {max(rank, *ranks, 0)} is not between 1 and {_VLLM_RANKS[-1]}")
    if config.get("use_dora"):
        found.append("it uses DoRA")
    if config.get("bias", "none") != "none" or config.get("lora_bias"):
        found.append("it has biases")
    if config.get("modules_to_save"):
        found.append(f"it replaces whole modules {config['modules_to_save']}")
    return found


def _by_pattern(pattern: dict[str, Any] | None, module: str, default: float) -> float:
    for key, value in (pattern or {}).items():
        if re.match(rf"(.*\.)?({key})$", module):
            return float(value)
    return default


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(name, allow_patterns=["adapter_*"]))
    except (OSError, HFValidationError) as error:
        raise AdapterError(f"there is no LoRA adapter {name}: no such folder, and from the hub: {error}") from error
