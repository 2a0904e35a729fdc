"""Model folders with quantised weights, and the same weights dequantised; written by hand, no quantiser is needed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

_INT8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}


def write_int8(model: Path, path: Path) -> Path:
    """compressed-tensors W8A8: int8 weights with a scale for each row, activations in int8 with a scale a token."""
    weights = {}
    for name, weight in load_file(model / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            values, scale = _to_int8(weight)
            weights[name], weights[name.removesuffix("weight") + "weight_scale"] = values, scale
        else:
            weights[name] = weight
    return _write(model, path, weights, quantization_config=_INT8)


def write_dequantised_int8(model: Path, path: Path) -> Path:
    """The float weights that `write_int8` stands for."""
    weights = load_file(model / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith("_proj.weight"):
            values, scale = _to_int8(weight)
            weights[name] = values.float() * scale
    return _write(model, path, weights)


def write_dequantised_fp8(model: Path, path: Path) -> Path:
    """The float weights of vLLM's own `quantization = "fp8_per_channel"`: e4m3 with a scale for each row."""
    weights = load_file(model / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith("_proj.weight"):
            scale = weight.abs().amax(1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
            weights[name] = (weight / scale).to(torch.float8_e4m3fn).float() * scale
    return _write(model, path, weights)


def _to_int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # Up to 63 and not 127: on a CPU without VNNI, oneDNN adds pairs of products in 16 bits, which saturate beyond that.
    scale = weight.abs().amax(1, keepdim=True) / 63
    return (weight / scale).round().to(torch.int8), scale


def _write(model: Path, path: Path, weights: dict[str, torch.Tensor], **config: object) -> Path:
    shutil.copytree(model, path)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((path / "config.json").read_text(encoding="utf-8"))
    (path / "config.json").write_text(json.dumps({**settings, **config}, indent=2) + "\n", encoding="utf-8")
    return path
