"""What Hugging Face's own implementation computes at every alias, in float32 on CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

_PROBE = "harvest_probe"


@dataclass(frozen=True, kw_only=True)
class Modules:
    """Names of Hugging Face modules; those of `layer` are relative to a decoder layer."""

    embed: str = "model.embed_tokens"
    layers: str = "model.layers"
    final_norm: str = "model.norm"
    attention: str = "self_attn"
    out_projection: str = "self_attn.o_proj"
    mlp_in: str = "mlp"
    mlp_out: str = "mlp"
    last_projection: str | None = "mlp.down_proj"
    # The module whose input is the stream between attention and MLP.
    mid: str | None = "post_attention_layernorm"
    router: str | None = None


_LLAMA = Modules()
MODULES: dict[str, Modules] = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "mistral", "phi3", "glm4"), _LLAMA),
    **dict.fromkeys(("gemma2", "gemma3_text"), replace(_LLAMA, mid="pre_feedforward_layernorm")),
    "olmo2": replace(_LLAMA, mid="mlp"),
    "cohere": replace(_LLAMA, mid=None),
    "qwen3_moe": replace(_LLAMA, router="mlp.gate"),
    "deepseek_v2": replace(_LLAMA, router="mlp.gate"),
    "gpt_oss": replace(_LLAMA, router="mlp.router", last_projection=None),
    "gpt2": Modules(
        embed="transformer.wte",
        layers="transformer.h",
        final_norm="transformer.ln_f",
        attention="attn",
        out_projection="attn.c_proj",
        last_projection="mlp.c_proj",
        mid="ln_2",
    ),
    "opt": Modules(
        embed="model.decoder.embed_tokens",
        layers="model.decoder.layers",
        final_norm="model.decoder.final_layer_norm",
        out_projection="self_attn.out_proj",
        mlp_in="fc1",
        mlp_out="fc2",
        last_projection="fc2",
        mid="final_layer_norm",
    ),
    "falcon": Modules(
        embed="transformer.word_embeddings",
        layers="transformer.h",
        final_norm="transformer.ln_f",
        attention="self_attention",
        out_projection="self_attention.dense",
        last_projection="mlp.dense_4h_to_h",
        mid=None,
    ),
    "gpt_neox": Modules(
        embed="gpt_neox.embed_in",
        layers="gpt_neox.layers",
        final_norm="gpt_neox.final_layer_norm",
        attention="attention",
        out_projection="attention.dense",
        last_projection="mlp.dense_4h_to_h",
        mid=None,
    ),
}
MODULES["falcon_serial"] = replace(MODULES["falcon"], mid="post_attention_layernorm")
MODULES["gpt_neox_serial"] = replace(MODULES["gpt_neox"], mid="post_attention_layernorm")


def reference_rows(family: str, model: nn.Module, ids: Sequence[int]) -> dict[str, Tensor]:
    """Rows [tokens, width] of every alias that the family has, by canonical name; `logits` of the last token only."""
    names = MODULES[family]
    model_type = model.config.model_type
    rows: dict[str, Tensor] = {}
    layers = model.get_submodule(names.layers)
    model.config._attn_implementation = _PROBE if model_type != "falcon" else "sdpa"
    with contextlib.ExitStack() as undo, torch.no_grad():
        for index, layer in enumerate(layers):
            _watch(undo, layer, before=rows, name=f"residual_pre.{index}")
            _watch(undo, layer, after=rows, name=f"residual.{index}")
            attention = layer.get_submodule(names.attention)
            _watch(undo, attention, before=rows, name=f"attn_in.{index}")
            _watch(undo, attention, after=rows, name=f"attn_out.{index}")
            _watch(undo, layer.get_submodule(names.out_projection), before=rows, name=f"heads.{index}")
            _watch(undo, layer.get_submodule(names.mlp_in), before=rows, name=f"mlp_in.{index}")
            _watch(undo, layer.get_submodule(names.mlp_out), after=rows, name=f"mlp_out.{index}")
            if names.mid is not None:
                _watch(undo, layer.get_submodule(names.mid), before=rows, name=f"residual_mid.{index}")
            last = _child(layer, names.last_projection)
            if last is not None:
                _watch(undo, last, before=rows, name=f"neurons.{index}")
        _watch(undo, model.get_submodule(names.final_norm), after=rows, name="final_norm")
        undo.enter_context(_watch_kernels(rows, len(layers), model.config))
        logits = model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits
        rows["logits"] = logits[0, -1:]
        # Some families scale inside their embedding module: the alias is the table's row itself.
        rows["embed"] = functional.embedding(torch.tensor(list(ids)), model.get_submodule(names.embed).weight)
        for index, layer in enumerate(layers):
            router = _child(layer, names.router)
            if router is not None:
                bias = getattr(router, "bias", None)
                rows[f"router.{index}"] = functional.linear(rows[f"mlp_in.{index}"], router.weight, bias)
    return {name: tensor.reshape(-1, tensor.shape[-1]).float() for name, tensor in rows.items()}


def _child(layer: Any, path: str | None) -> Any:
    try:
        return None if path is None else layer.get_submodule(path)
    except AttributeError:
        return None


def _watch(
    undo: contextlib.ExitStack,
    module: Any,
    *,
    name: str,
    before: dict[str, Tensor] | None = None,
    after: dict[str, Tensor] | None = None,
) -> None:
    def take_input(_: Any, args: Any, kwargs: Any) -> None:
        assert before is not None
        before[name] = (args[0] if args else kwargs["hidden_states"]).clone()

    def take_output(_: Any, args: Any, kwargs: Any, output: Any) -> None:
        assert after is not None
        after[name] = (output[0] if isinstance(output, tuple) else output).clone()

    if before is not None:
        handle = module.register_forward_pre_hook(take_input, with_kwargs=True)
    else:
        handle = module.register_forward_hook(take_output, with_kwargs=True)
    undo.callback(handle.remove)


@contextlib.contextmanager
def _watch_kernels(rows: dict[str, Tensor], n_layers: int, config: Any) -> Iterator[None]:
    """Record what attention kernels receive, [1, heads, tokens, head_dim], as [tokens, heads * head_dim]."""

    def keep(layer: int, **received: Tensor) -> None:
        for name, tensor in received.items():
            rows[f"{name}.{layer}"] = tensor[0].transpose(0, 1).flatten(1).clone()

    if config.model_type == "falcon":  # calls torch's kernel itself, with key-value heads repeated
        calls = iter(range(n_layers))
        repeats = config.num_attention_heads // config.num_kv_heads if config.new_decoder_architecture else 1
        kernel: Callable[..., Tensor] = functional.scaled_dot_product_attention

        def attend(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            keep(next(calls), q=query, k=key[:, ::repeats], v=value[:, ::repeats])
            return kernel(query, key, value, *args, **kwargs)

        functional.scaled_dot_product_attention = attend
        try:
            yield
        finally:
            functional.scaled_dot_product_attention = kernel
        return

    def probe(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        # OPT scales its queries itself; everywhere else the kernel does, and so it does in vLLM.
        keep(module.layer_idx, q=query * module.head_dim**0.5 if config.model_type == "opt" else query, k=key, v=value)
        eager = _eager_of(module)
        return eager(module, query, key, value, *args, **kwargs)

    ALL_ATTENTION_FUNCTIONS.register(_PROBE, probe)
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask

    ALL_MASK_ATTENTION_FUNCTIONS.register(_PROBE, eager_mask)
    yield


def _eager_of(module: Any) -> Callable[..., Any]:
    """The plain implementation that the module's own file defines."""
    import sys

    eager: Callable[..., Any] = sys.modules[type(module).__module__].eager_attention_forward
    return eager
