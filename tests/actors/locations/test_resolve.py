"""Resolving on weightless trees: what is found, and what errors say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Gemma4TextConfig, MiniCPM3Config, StableLmConfig
from vllm.ir.op import IrOp

from actors.worker.locations import (
    Location,
    UnknownLocation,
    UnreadableLocation,
    describe_locations,
    last_layer_needed,
    read,
    resolve_in_view,
    resolve_locations,
    view_model,
)
from actors.worker.locations.view import ModelView
from actors.worker.tree import build_model_tree, inspect_architectures_in_process
from tests.actors.locations.tiny import tiny_config


@pytest.fixture(scope="module")
def views(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Views of weightless models by (family, ranks)."""
    inspect_architectures_in_process()
    made: dict[tuple[str, int], ModelView] = {}

    def view(family: str, tp_size: int = 1) -> ModelView:
        if (family, tp_size) not in made:
            path = tmp_path_factory.mktemp(family)
            tiny_config(family).save_pretrained(path)
            made[family, tp_size] = view_model(build_model_tree(str(path), max_model_len=64), tp_size=tp_size)
        return made[family, tp_size]

    return view


def names(view: ModelView, *asked: str) -> list[str]:
    return [location.name for location in resolve_in_view(view, asked)]


def test_names_that_stand_for_several(views: Any) -> None:
    qwen3 = views("qwen3")
    assert names(qwen3, "residual.*") == ["residual.0", "residual.1", "residual.2"]
    assert names(qwen3, "residual_post.0:3:2") == ["residual.0", "residual.2"]
    assert names(qwen3, "model.layers.1:.mlp.output") == ["model.layers.1.mlp.output", "model.layers.2.mlp.output"]
    assert names(qwen3, "model.layers.0.*_layernorm.input") == [
        "model.layers.0.input_layernorm.input",
        "model.layers.0.post_attention_layernorm.input",
    ]
    assert names(qwen3, "residual.1", "residual.*", "residual_post.1") == ["residual.1", "residual.0", "residual.2"]
    # A model that mixes kinds of layers: * means those that have it, a number means that one.
    assert names(views("qwen3_moe"), "neurons.*", "router.*") == ["neurons.0", "router.1", "router.2"]


def test_a_location_says_where_its_rows_are(views: Any) -> None:
    (residual, value, negative) = resolve_in_view(
        views("qwen3"), ["residual.1", "model.layers.1.self_attn.attn.inputs[0][2]", "model.layers.1.output[-1]"]
    )
    assert (residual.element, residual.addend, residual.layer) == ((0,), (1,), 1)
    assert residual.path == "model.layers.1.output[0] + model.layers.1.output[1]"
    assert (value.element, value.width, value.array) == ((0, 2), 64, "model.layers.1.self_attn.attn.inputs.0.2")
    assert (negative.element, negative.alias) == ((1,), None)
    assert json.loads(json.dumps(residual.to_json()))["width"] == 64


@pytest.mark.parametrize(
    ("family", "name", "error", "says"),
    [
        ("qwen3", "residul.1", UnknownLocation, "close matches: residual"),
        ("qwen3", "residual", UnknownLocation, r"residual\.2.*residual\.\*"),
        ("qwen3", "residual.3", UnknownLocation, "3 layers, 0 to 2"),
        ("qwen3", "residual.2:2", UnknownLocation, "names no layer"),
        ("qwen3", "embed.0", UnknownLocation, "exists once"),
        ("qwen3", "router.1", UnknownLocation, r"Qwen3 \(Qwen3ForCausalLM\) has no router\.1: its MLPs are dense"),
        ("qwen3_moe", "neurons.1", UnknownLocation, "Qwen3-MoE .* has no neurons.1: its experts"),
        ("cohere", "residual_mid.0", UnknownLocation, "Cohere .* has no residual_mid.0: attention and MLP both"),
        ("deepseek_v2", "k.0", UnknownLocation, "DeepSeek.* has no k.0: multi-head latent attention"),
        ("qwen3", "model.layers.1.mpl.output", UnknownLocation, "model.layers.1.mlp.*model.layers.1 has self_attn"),
        ("qwen3", "model.layers.*.nothing.output", UnknownLocation, "fits no module"),
        ("qwen3", "model.layers.1.output[2]", UnknownLocation, r"no element \[2\]"),
        ("qwen3", "model.layers.1.mlp.output[0][1]", UnknownLocation, r"has no element"),
        ("qwen3", "model.layers.1.output", UnreadableLocation, r"output\[0\] or .*output\[1\]; .* residual\.1"),
        ("qwen3", "model.layers.1.self_attn.o_proj.output", UnreadableLocation, r"None\); ask for .*output\[0\]"),
        ("qwen3", "model.layers.1.input", UnreadableLocation, "rows of integers"),
        ("qwen3", "lm_head.output", UnreadableLocation, "not called in a pass"),
        ("gpt2", "transformer.h.0.mlp.act.output", UnreadableLocation, "called 3 times in one pass"),
        ("qwen3", "logits_processor.input", UnreadableLocation, "not a tensor but ParallelLMHead"),
    ],
)
def test_errors_say_what_where_and_what_to_do(
    views: Any, family: str, name: str, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        resolve_in_view(views(family), [name])


def test_stopping_early(views: Any) -> None:
    def last(*asked: str) -> int | None:
        return last_layer_needed(resolve_in_view(views("qwen3"), asked))

    assert last("embed") == 0
    assert last("residual.1", "q.0", "embed") == 1
    assert last("residual_pre.2") == 1
    assert last("model.layers.2.mlp.act_fn.output") == 2
    assert last("residual.0", "logits") is None
    assert last("final_norm") is None
    assert last("model.norm.output[1]") is None


def test_layouts_at_two_ranks(views: Any) -> None:
    def labels(family: str, *asked: str) -> list[str]:
        return [location.layout.label for location in resolve_in_view(views(family, 2), asked)]

    assert labels("qwen3", "residual.0", "q.0", "heads.0", "neurons.0") == ["replicated", "heads", "columns", "columns"]
    assert labels(
        "qwen3", "model.layers.0.self_attn.qkv_proj.output[0]", "model.layers.0.mlp.gate_up_proj.output[0]"
    ) == ["qkv fused", "gate_up fused"]
    assert labels("qwen3", "model.layers.0.mlp.act_fn.input") == ["gate_up fused"]
    assert labels("cohere", "attn_out.0", "mlp_out.0", "residual.0") == ["partial sum", "partial sum", "replicated"]
    assert labels("falcon", "attn_out.0", "mlp_out.0") == ["partial sum", "partial sum"]


def test_widths_are_full_widths_at_any_number_of_ranks(views: Any) -> None:
    asked = ["residual.0", "q.0", "k.0", "neurons.0", "logits", "model.layers.0.self_attn.qkv_proj.output[0]"]
    one, two = (resolve_in_view(views("llama", ranks), asked) for ranks in (1, 2))
    assert [location.width for location in one] == [location.width for location in two]


@pytest.mark.parametrize(
    ("family", "asked"),
    [("qwen3", "residual.1"), ("qwen3", "model.layers.0.self_attn.q_norm.output"), ("olmo2", "neurons.1")],
)
def test_reading_is_traced_into_a_compiled_forward(views: Any, family: str, asked: str) -> None:
    """`read` adds no graph break, and gives [T, width] whatever the shape of the value."""
    (location,) = resolve_in_view(views(family), [asked])
    shape = {"residual.1": (7, 64), "model.layers.0.self_attn.q_norm.output": (7, 4, 32), "neurons.1": (1, 7, 96)}

    def forward(x: Tensor) -> Tensor:
        output = (x, 2 * x) if location.addend is not None else x
        a, b = read(location, (x,), {}, output)
        return a.clone() if b is None else a + b

    x = torch.randn(shape[asked])
    rows = torch.compile(forward, backend="eager", fullgraph=True)(x)
    assert rows.shape == (7, location.width)
    assert torch.equal(rows.flatten(), (3 * x if location.addend is not None else x).flatten())


@pytest.mark.parametrize(
    ("config", "architecture", "path"),
    [
        (StableLmConfig, "StableLmForCausalLM", "model.layers.0.output[0]"),
        (MiniCPM3Config, "MiniCPM3ForCausalLM", "model.layers.0.output[0]"),
        (Gemma4TextConfig, "Gemma4ForCausalLM", "model.layers.0.output[0]"),
    ],
)
def test_pairs_that_do_not_add_up_are_recognised(config: type, architecture: str, path: str, tmp_path: Path) -> None:
    """Families whose first returned tensor already is the stream, found from the data flow alone."""
    config(num_hidden_layers=2, architectures=[architecture]).save_pretrained(tmp_path)
    (location,) = resolve_locations(build_model_tree(str(tmp_path), max_model_len=64), ["residual.0"])
    assert location.path == path
    assert location.addend is None


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
        {"quant_method": "fp8", "activation_scheme": "dynamic"},
    ],
    ids=["awq", "fp8"],
)
def test_quantised_weights_change_no_width(quantization: dict[str, Any], tmp_path: Path) -> None:
    config = tiny_config("qwen3", intermediate_size=128)
    config.quantization_config = quantization
    config.save_pretrained(tmp_path)
    tree = build_model_tree(str(tmp_path), max_model_len=64)
    asked = ["residual.1", "neurons.1", "q.1", "model.layers.0.self_attn.qkv_proj.output[0]", "logits"]
    for ranks in (1, 2):
        found = resolve_locations(tree, asked, tp_size=ranks)
        assert [location.width for location in found] == [64, 128, 128, 256, 160]


def test_kernels_that_know_no_meta_tensors_take_no_part(views: Any) -> None:
    """In eager mode on a GPU, vLLM's operations choose kernels that only take real tensors."""
    operation = IrOp.registry["rms_norm"]
    model = views("qwen3").model

    @operation.register_impl("real_only")
    def real_only(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
        raise NotImplementedError("attempted to run this operator with Meta tensors")

    try:
        with operation.set_priority(["real_only", "native"]):
            chosen = operation.get_priority()
            assert chosen[0] == "real_only"
            view = view_model(model)
            assert operation.get_priority() == chosen
    finally:
        del operation.impls["real_only"]
    assert view.values.failure is None


def test_describe_lists_sides_widths_and_aliases(tmp_path: Path) -> None:
    tiny_config("qwen3").save_pretrained(tmp_path)
    rows = {row.path: row for row in describe_locations(str(tmp_path), max_model_len=64)}
    layer = rows["model.layers.1"]
    assert layer.class_name == "Qwen3DecoderLayer"
    assert [(side.text, side.width) for side in layer.sides] == [
        ("output[0]", 64),
        ("output[1]", 64),
        ("inputs[0][1]", 64),
        ("inputs[0][2]", 64),
    ]
    assert set(layer.aliases) == {"residual_pre.2", "residual.1"}
    assert rows["model.layers.1.self_attn.attn"].aliases == ("q.1", "k.1", "v.1")
    assert rows["lm_head"].note == "not called in a pass"
    # Whatever is listed can be asked for.
    tree = build_model_tree(str(tmp_path), max_model_len=64)
    for row in rows.values():
        asked = [f"{row.path}.{side.text}" for side in row.sides]
        found: tuple[Location, ...] = resolve_locations(tree, asked) if "layers.1" in row.path and asked else ()
        assert all(location.width == side.width for location, side in zip(found, row.sides, strict=False))


def test_a_model_without_its_configuration_is_refused() -> None:
    from actors.worker.locations import LocationError

    with pytest.raises(LocationError, match="pass vllm_config"):
        resolve_locations(nn.Linear(2, 2), ["embed"])
