"""Tiny LoRA adapters in PEFT's format, with products as large as the weights they change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ALL_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_tiny_adapter(
    model: Path,
    path: Path,
    *,
    rank: int = 4,
    alpha: float = 8,
    projections: tuple[str, ...] = ALL_PROJECTIONS,
    rename: tuple[str, str] = ("", ""),
    seed: int = 0,
    **config: Any,
) -> Path:
    """Write an adapter for the projections of all layers of the model folder `model`.

    `rename` replaces a piece of every module's name, so that the adapter does not fit; `config` goes into
    adapter_config.json.
    """
    path.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in sorted(load_file(model / "model.safetensors").items()):
        module = name.removesuffix(".weight")
        if not module.endswith(projections):
            continue
        n_out, n_in = weight.shape
        stem = f"base_model.model.{module.replace(*rename) if rename[0] else module}"
        tensors[f"{stem}.lora_A.weight"] = torch.randn(rank, n_in, generator=generator) * n_in**-0.5
        tensors[f"{stem}.lora_B.weight"] = torch.randn(n_out, rank, generator=generator) * 0.5 / alpha
    save_file(tensors, path / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(projections),
        "bias": "none",
        **config,
    }
    (path / "adapter_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return path


def write_merged(model: Path, adapter: Path, path: Path) -> Path:
    """A model folder whose weights hold the adapter's products, computed here from the files alone."""
    import shutil

    shutil.copytree(model, path)
    settings = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    weights = load_file(model / "model.safetensors")
    pairs = load_file(adapter / "adapter_model.safetensors")
    for name in weights:
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{stem}.lora_A.weight" in pairs:
            a, b = pairs[f"{stem}.lora_A.weight"].double(), pairs[f"{stem}.lora_B.weight"].double()
            weights[name] = (weights[name].double() + settings["lora_alpha"] / settings["r"] * b @ a).float()
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path
