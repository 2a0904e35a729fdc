"""The module tree: vLLM's own, weightless, and harmless to the process that builds it."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import Qwen3Config
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.distributed import parallel_state

from actors.worker.tree import build_model_tree, parallel_groups


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


def test_tree_ignores_placement_arguments(large_qwen3: str) -> None:
    plain = build_model_tree(large_qwen3)
    placed = build_model_tree(large_qwen3, tensor_parallel_size=4, distributed_executor_backend="ray")
    assert str(plain) == str(placed)


def test_tree_lives_beside_an_engine(large_qwen3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees before and during an engine's life: neither disturbs the other."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    build_model_tree(large_qwen3)
    assert not torch.distributed.is_initialized()
    llm = LLM(
        large_qwen3,
        load_format="dummy",
        hf_overrides={
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "vocab_size": 128,
        },
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=64,
        kv_cache_memory_bytes=1 << 26,
    )
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
