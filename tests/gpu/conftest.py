"""A tiny bfloat16 model whose heads fit a GPU's attention kernels, prompts, and what transformers makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

LAYERS = 4


@pytest.fixture(scope="session")
def gpu_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3 of 4 layers, width 256, 4 heads of 64, 2 KV heads."""
    import torch

    from tests.tiny_models import make_tiny_model

    return make_tiny_model(
        "qwen3",
        tmp_path_factory.mktemp("gpu") / "model",
        layers=LAYERS,
        hidden=256,
        intermediate=512,
        head_dim=64,
        dtype=torch.bfloat16,
    )


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """24 prompts of 1 to 300 tokens."""
    random = np.random.default_rng(5)
    lengths = [1, 2, 300, *random.integers(1, 200, 21)]
    return [random.integers(5, 1000, int(length)).tolist() for length in lengths]


class Reference:
    """Rows of every alias by transformers in float32 from the bfloat16 weights, one sequence at a time."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self._known: dict[tuple[int, ...], dict[str, Any]] = {}

    def __call__(self, token_ids: list[int]) -> dict[str, Any]:
        """Location -> [tokens, width] float32; `logits` of the last token only."""
        from tests.actors.locations.reference import reference_rows

        key = tuple(token_ids)
        if key not in self._known:
            rows = reference_rows("qwen3", self._model, token_ids)
            self._known[key] = {name: tensor.numpy() for name, tensor in rows.items()}
        return self._known[key]


@pytest.fixture(scope="session")
def reference(gpu_model: Path) -> Reference:
    """What the rows must be, but for bfloat16's rounding."""
    return Reference(gpu_model)
