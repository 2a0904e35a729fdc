"""All that resolving needs to know of a model: its TP=1 tree, what flows through it, its family, its ranks' shapes.

A view is made from a meta-device tree or from a loaded model. A loaded model is only asked for its configuration:
weightless twins, one at TP=1 and one as this engine's ranks see it, are built and observed in its place.
"""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch import nn
from vllm.config import CompilationMode, CUDAGraphMode, VllmConfig, get_current_vllm_config_or_none

from actors.location_errors import LocationError
from actors.worker.locations.families import LLAMA, Family, family_of
from actors.worker.locations.values import ModelValues, observe
from actors.worker.tree import build_tree_from_config, parallel_groups

# Where the text model of a multimodal one lives.
_PREFIXES = ("", "language_model.")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelView:
    """A model's TP=1 tree with its values; `shard` and `shard_values` as rank 0 of `tp_size` ranks sees them."""

    model: nn.Module
    values: ModelValues
    shard: nn.Module
    shard_values: ModelValues
    tp_size: int
    architecture: str
    family: Family
    prefix: str
    """Put before the family's paths."""
    n_layers: int
    paths: dict[int, str]
    """Module path by the id of the module, so that a shared module has one name."""

    @property
    def layers(self) -> str:
        """Path of the list of decoder layers."""
        return self.prefix + self.family.layers


def view_model(model: nn.Module, vllm_config: VllmConfig | None = None, tp_size: int | None = None) -> ModelView:
    """Observe a model.

    Args:
        model: a tree of `build_model_tree`, or a loaded model of a running engine.
        vllm_config: of the engine; found on the model when left out.
        tp_size: tensor-parallel ranks; the engine's own when left out.

    Raises:
        LocationError: the model's configuration is nowhere to be found.
    """
    config = vllm_config or get_current_vllm_config_or_none() or _config_of(model)
    ranks = config.parallel_config.tensor_parallel_size if tp_size is None else tp_size
    tree, values = _observe_twin(config, 1)
    shard, shard_values = (tree, values) if ranks == 1 else _observe_twin(config, ranks)
    architecture, family, prefix = _identify(tree, config)
    layers = _submodule(tree, prefix + family.layers)
    return ModelView(
        model=tree,
        values=values,
        shard=shard,
        shard_values=shard_values,
        tp_size=ranks,
        architecture=architecture,
        family=family,
        prefix=prefix,
        n_layers=len(layers) if isinstance(layers, nn.ModuleList) else 0,
        paths={id(module): path for path, module in tree.named_modules() if path},
    )


def _observe_twin(config: VllmConfig, tp_size: int) -> tuple[nn.Module, ModelValues]:
    twin = _twin_config(config, tp_size)
    with parallel_groups(tp_size=tp_size):
        tree = build_tree_from_config(twin)
        return tree, observe(tree, twin)


def _twin_config(config: VllmConfig, tp_size: int) -> VllmConfig:
    """The configuration with own registries, uncompiled; the original learns nothing of the twin."""
    twin = copy.copy(config)
    twin.parallel_config = copy.copy(config.parallel_config)
    twin.parallel_config.tensor_parallel_size = tp_size
    twin.parallel_config.world_size = tp_size
    compilation = twin.compilation_config = copy.copy(config.compilation_config)
    compilation.mode = CompilationMode.NONE
    compilation.cudagraph_mode = CUDAGraphMode.NONE
    compilation.static_forward_context = {}
    compilation.static_all_moe_layers = []
    compilation.enabled_custom_ops = Counter()
    compilation.disabled_custom_ops = Counter()
    twin.quant_config = copy.deepcopy(config.quant_config)
    return twin


def _config_of(model: nn.Module) -> VllmConfig:
    for module in model.modules():
        config = getattr(module, "vllm_config", None)
        if isinstance(config, VllmConfig):
            return config
    raise LocationError(
        f"{type(model).__name__} does not carry vLLM's configuration; pass vllm_config to resolve its locations"
    )


def _identify(tree: nn.Module, config: VllmConfig) -> tuple[str, Family, str]:
    text_model: Any = getattr(tree, "language_model", None) or tree
    on_transformers = type(text_model).__name__.startswith("Transformers")
    architectures = config.model_config.hf_config.architectures or ["?"]
    architecture = architectures[0] if on_transformers else type(text_model).__name__
    family = family_of(architecture, config.model_config.hf_text_config, transformers_backend=on_transformers)
    if family is None:
        # An unlisted family may well have Llama's module names; what it lacks is then refused by name.
        family = Family(name=architecture, layers=LLAMA.layers, once=LLAMA.once, layer=LLAMA.layer)
    for prefix in _PREFIXES:
        if isinstance(_submodule(tree, prefix + family.layers), nn.ModuleList):
            return architecture, family, prefix
    return architecture, family, ""


def _submodule(model: nn.Module, path: str) -> nn.Module | None:
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None
