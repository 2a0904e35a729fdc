"""Depth: stop the forward after the last layer that a harvest needs, and drop what lies behind it.

vLLM's decoders loop over `layers[start_layer:end_layer]`, as pipeline stages do, so a smaller `end_layer` set before
the first
forward shortens the eager, the compiled and the captured pass alike. The layers behind it give back their weights, and
their
attention layers are taken out of the registry from which the KV cache is planned. On the Transformers backend, which
has no such bounds, dead layers become identities.

What comes after the last layer (final norm, LM head, sampler) still runs on the shortened stream: the sampled token is
meaningless, so a run that generates, or wants logits, is never shortened.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

# What decoders call their list of layers.
_LAYER_LISTS = ("layers", "h", "blocks")


@dataclass(frozen=True, kw_only=True, slots=True)
class Depth:
    """How much of a model runs."""

    n_layers: int
    n_layers_run: int


class _Identity(nn.Module):
    """Hands its hidden state on."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden_states


def shorten(model: nn.Module, last_layer: int | None, static_forward_context: dict[str, Any]) -> Depth | None:
    """Make `last_layer` the last one that runs.

    Args:
        model: the loaded model, before its first forward.
        last_layer: index of the last needed decoder layer; None to leave the model as it is.
        static_forward_context: vLLM's registry of attention layers by name; dead ones are removed.

    Returns:
        The depth before and after; None where no list of decoder layers is found, or nothing is to be dropped.
    """
    decoder = _find_decoder(model)
    if decoder is None:
        return None
    layers = _layer_list(decoder)
    assert layers is not None
    n_layers = len(layers)
    if last_layer is None or last_layer + 1 >= n_layers:
        return Depth(n_layers=n_layers, n_layers_run=n_layers)
    end = last_layer + 1
    bounded = hasattr(decoder, "end_layer") and hasattr(decoder, "start_layer")
    for name in list(static_forward_context):
        layer = layer_of(name)
        if layer is not None and layer >= end:
            del static_forward_context[name]
    for index in range(end, n_layers):
        layers[index] = _Identity()
    # With a LoRA adapter, vLLM's manager holds the modules too.
    wrapped = model.lora_manager.modules if hasattr(model, "lora_manager") else {}
    for name in [name for name in wrapped if (layer_of(name) or 0) >= end]:
        del wrapped[name]
    if bounded:
        decoder.end_layer = end
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return Depth(n_layers=n_layers, n_layers_run=end)


def _find_decoder(model: nn.Module) -> Any | None:
    lists = (module for module in model.modules() if _layer_list(module) is not None)
    return next(lists, None)


def _layer_list(module: nn.Module) -> nn.ModuleList | None:
    for name in _LAYER_LISTS:
        layers = getattr(module, name, None)
        if isinstance(layers, nn.ModuleList):
            return layers
    return None


def layer_of(name: str) -> int | None:
    """The decoder layer of a module's name (`model.layers.7.self_attn.attn`)."""
    parts = name.split(".")
    for part, number in pairwise(parts):
        if part in _LAYER_LISTS and number.isdigit():
            return int(number)
    return None
