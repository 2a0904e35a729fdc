"""The module tree: vLLM's own, weightless, and harmless to the process that builds it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import Olmo2Model, Qwen3Config
from vllm import SamplingParams, TokensPrompt
from vllm.distributed import parallel_state
from vllm.model_executor.layers import rotary_embedding

from actors.worker.tree import build_model_tree, parallel_groups
from tests.actors.locations.tiny import tiny_config
from tests.engines import open_engine


@pytest.fixture(scope="module")
def large_qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A config of Qwen3-8B's shape; no weights exist."""
    folder = tmp_path_factory.mktemp("qwen3-8b")
    Qwen3Config(
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=12,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        architectures=["Qwen3ForCausalLM"],
    ).save_pretrained(folder)
    return str(folder)


def test_tree_prints_vllms_own_modules(large_qwen3: str) -> None:
    model = build_model_tree(large_qwen3)
    assert str(model.get_submodule("model.layers.10.mlp")) == (
        "Qwen2MLP(\n"
        "  (gate_up_proj): MergedColumnParallelLinear(in_features=4096, output_features=24576, bias=False, "
        "tp_size=1, gather_output=False)\n"
        "  (down_proj): RowParallelLinear(in_features=12288, output_features=4096, bias=False, tp_size=1, "
        "reduce_results=True)\n"
        "  (act_fn): SiluAndMul()\n"
        ")"
    )
    assert {p.device.type for p in model.parameters()} == {"meta"}


def test_tree_needs_no_device(large_qwen3: str) -> None:
    """Where vLLM finds no platform at all, as a GPU build does on a machine without a GPU."""
    code = (
        "import sys, vllm.platforms as platforms\n"
        "platforms.resolve_current_platform_cls_qualname = lambda: 'vllm.platforms.interface.UnspecifiedPlatform'\n"
        "from actors.worker.tree import build_model_tree\n"
        "print(build_model_tree(sys.argv[1]).model.norm)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, large_qwen3], capture_output=True, text=True, check=False)
    assert "RMSNorm(hidden_size=4096, eps=1e-06)" in done.stdout, done.stderr[-2000:]


def test_tree_shares_nothing_with_an_engine_of_the_same_model(tmp_path: Path) -> None:
    """Neither vLLM's cached rotary modules nor Hugging Face's classes."""
    tiny_config("olmo2").save_pretrained(tmp_path)
    init = Olmo2Model.__init__
    tree = build_model_tree(str(tmp_path), max_model_len=64)
    assert isinstance(tree.model, Olmo2Model)
    assert Olmo2Model.__init__ is init
    assert not any(
        tensor.device.type == "meta" for module in rotary_embedding._ROPE_DICT.values() for tensor in module.buffers()
    )


def test_tree_ignores_placement_arguments(large_qwen3: str) -> None:
    plain = build_model_tree(large_qwen3)
    placed = build_model_tree(large_qwen3, tensor_parallel_size=4, distributed_executor_backend="ray")
    assert str(plain) == str(placed)


def test_tree_lives_beside_an_engine(large_qwen3: str) -> None:
    """Trees before and during an engine's life: neither disturbs the other."""
    build_model_tree(large_qwen3)
    assert not torch.distributed.is_initialized()
    with open_engine(
        Path(large_qwen3),
        load_format="dummy",
        hf_overrides={
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "vocab_size": 128,
        },
        skip_tokenizer_init=True,
        max_model_len=64,
    ) as llm:
        asked = [TokensPrompt(prompt_token_ids=[1, 2, 3])]
        greedy = SamplingParams(temperature=0.0, max_tokens=4, detokenize=False)
        before = llm.generate(asked, greedy, use_tqdm=False)[0].outputs[0].token_ids
        group = parallel_state.get_tp_group()
        assert isinstance(build_model_tree(large_qwen3), nn.Module)
        assert parallel_state.get_tp_group() is group
        assert llm.generate(asked, greedy, use_tqdm=False)[0].outputs[0].token_ids == before


def test_groups_are_put_back_after_an_error() -> None:
    before = parallel_state._TP
    with pytest.raises(RuntimeError), parallel_groups(tp_size=4, rank=3):
        assert parallel_state.get_tensor_model_parallel_rank() == 3
        raise RuntimeError
    assert parallel_state._TP is before
