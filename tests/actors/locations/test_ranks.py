"""Two ranks give the rows that one gives, at every location of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from actors.worker.locations.families import ONCE, PER_LAYER
from tests.actors.locations.ranks import rows_of_all_locations
from tests.actors.locations.test_parity import relative_error
from tests.actors.locations.tiny import ENGINE_ARGS, VOCAB_SIZE, tiny_config
from tests.tiny_models import scale_weights

TOLERANCE = 1e-5
_ALWAYS = [("qwen3", {}), ("llama", {"num_key_value_heads": 1})]
_MORE = [
    "qwen3_moe",
    "gemma3_text",
    "phi3",
    "olmo2",
    "gpt2",
    "opt",
    "falcon",
    "cohere",
    "gpt_neox",
    "deepseek_v2",
    "glm4",
]


@pytest.mark.parametrize(
    ("family", "changes"),
    [*_ALWAYS, *(pytest.param(family, {}, marks=pytest.mark.slow) for family in _MORE)],
    ids=str,
)
def test_two_ranks_equal_one(
    family: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(family, **changes), dtype=torch.float32)
    scale_weights(model, seed=1)
    model.save_pretrained(tmp_path)
    ids = torch.randint(3, VOCAB_SIZE, (23,)).tolist()
    arguments = ENGINE_ARGS.get(family, {})
    ranks, refused = rows_of_all_locations(tmp_path, ids, 2, **arguments)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-1")
    (one,), refused_by_one = rows_of_all_locations(tmp_path, ids, 1, **arguments)
    # Every rank hands out the same full rows, and refuses nothing that one rank does not refuse.
    assert refused.keys() == refused_by_one.keys(), {name: refused[name] for name in refused.keys() - refused_by_one}
    errors = {name: max(relative_error(rank[name][1], rows) for rank in ranks) for name, (_, rows) in one.items()}
    assert {name: (error, ranks[0][name][0]) for name, error in errors.items() if not error < TOLERANCE} == {}
    aliases = {name.partition(".")[0] for name in one} & {*ONCE, *PER_LAYER}
    assert len(aliases) >= 11
    # The test would be empty if nothing were sharded.
    labels = {label for label, _ in ranks[0].values()}
    assert {"replicated", "columns"} <= labels
    assert family == "deepseek_v2" or "heads" in labels
