"""The page's module tree and shape table, on the real Qwen3-8B configuration, without weights or a device."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harvest import VLLM

CONFIG = Path(__file__).with_name("qwen3_8b_config.json")

# Location on the page -> shape on the page, T for the tokens.
TABLE = {
    "model.embed_tokens.output": ["T", 4096],
    "L.input_layernorm.output[1]": ["T", 4096],
    "L.output[0]": ["T", 4096],
    "L.output[1]": ["T", 4096],
    "L.self_attn.qkv_proj.output[0]": ["T", 6144],
    "L.self_attn.attn.inputs[0][0]": ["T", 4096],
    "L.self_attn.attn.inputs[0][1]": ["T", 1024],
    "L.self_attn.attn.inputs[0][2]": ["T", 1024],
    "L.self_attn.o_proj.input": ["T", 4096],
    "L.self_attn.output": ["T", 4096],
    "L.mlp.act_fn.output": ["T", 12288],
    "L.mlp.output": ["T", 4096],
    "model.norm.output[0]": ["T", 4096],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLM]:
    folder = tmp_path_factory.mktemp("qwen3-8b")
    shutil.copy(CONFIG, folder / "config.json")
    yield VLLM(folder)


def test_the_tree_prints_as_on_the_page(model: VLLM) -> None:
    assert repr(model.model.layers[10].mlp) == (
        "Qwen2MLP(\n"
        "  (gate_up_proj): MergedColumnParallelLinear(in_features=4096, output_features=24576, bias=False, "
        "tp_size=1, gather_output=False)\n"
        "  (down_proj): RowParallelLinear(in_features=12288, output_features=4096, bias=False, tp_size=1, "
        "reduce_results=True)\n"
        "  (act_fn): SiluAndMul()\n"
        ")"
    )
    assert not model.dispatched
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("location", TABLE)
def test_the_shape_table(model: VLLM, location: str) -> None:
    from actors.worker.locations.view import view_model

    view = view_model(model._find_tree())
    path, _, rest = location.replace("L.", "model.layers.10.").rpartition(".")
    side, *indices = rest.replace("]", "").split("[")
    (call,) = view.values.calls[path]
    value: Any = call.output if side == "output" else (call.args, call.kwargs)
    if side == "input":
        value = call.args[0] if call.args else next(iter(call.kwargs.values()))
    for index in indices:
        value = value[int(index)]
    shape = ["T" if axis == value.token_axis else size for axis, size in enumerate(value.shape)]
    assert shape == TABLE[location]


def test_the_head_layout_of_the_page(model: VLLM) -> None:
    attention = model.model.layers[10].self_attn
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (32, 8, 128)
    assert (attention.q_size, attention.kv_size) == (4096, 1024)


def test_walking_the_tree(model: VLLM) -> None:
    layers = model.model.layers
    assert len(layers) == 36
    assert len(layers[3:5]) == 2
    assert len(list(layers)) == 36
    assert repr(layers[-1]) == repr(layers[35])
    with pytest.raises(IndexError, match="36 entries"):
        layers[36]
    with pytest.raises(AttributeError):
        _ = model.model.nothing


@pytest.mark.parametrize("side", ["output", "input", "inputs"])
def test_values_exist_inside_blocks_only(model: VLLM, side: str) -> None:
    with pytest.raises(RuntimeError, match="only inside a block"):
        getattr(model.model.layers[0], side)
    with pytest.raises(RuntimeError, match="only inside a block"):
        setattr(model.model.layers[0], side, 1)
    with pytest.raises(RuntimeError, match="only inside a block"):
        _ = model.logits
    with pytest.raises(RuntimeError, match="only inside a block"):
        _ = model.samples


def test_operations_print_without_an_engine(model: VLLM) -> None:
    text = str(model.model.layers[10].self_attn.source)
    for name in ("self_qkv_proj_0", "qkv_split_0", "self_rotary_emb_0", "self_attn_0", "self_o_proj_0"):
        assert name in text
