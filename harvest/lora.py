"""A LoRA adapter merged into a transformers model, by hand: the independent path for `harvest verify --parity`."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from actors.lora import Adapter
from harvest.errors import HarvestError

if TYPE_CHECKING:
    from torch import Tensor, nn

# PEFT: base_model.model.<module>.lora_A.weight, with the adapter's name before `weight` in some versions.
_TENSOR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.[^.]+)?(?:\.weight)?")


class MergeError(HarvestError):
    """An adapter that cannot be merged by hand."""


def merge_adapter(model: nn.Module, adapter: Adapter) -> int:
    """Add the adapter's products to the weights of a transformers model; returns how many modules changed.

    Raises:
        MergeError: a tensor of the adapter belongs to no module, or is of a kind that is not merged here.
    """
    import torch

    pairs: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, tensor in _tensors(adapter).items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise MergeError(f"the adapter {adapter.folder} has a tensor {name}, which is not merged by hand")
        pairs[match[1]][match[2]] = tensor
    for name, pair in pairs.items():
        try:
            weight = model.get_parameter(f"{name}.weight")
        except AttributeError:
            raise MergeError(f"the adapter {adapter.folder} changes {name}, which the model lacks") from None
        change = adapter.scale(name) * (pair["B"].float() @ pair["A"].float())
        with torch.no_grad():
            weight += (change.T if adapter.config.get("fan_in_fan_out") else change).to(weight)
    return len(pairs)


def _tensors(adapter: Adapter) -> dict[str, Tensor]:
    if adapter.weights.suffix == ".safetensors":
        from safetensors.torch import load_file

        loaded: dict[str, Tensor] = load_file(adapter.weights)
        return loaded
    import torch

    loaded = torch.load(adapter.weights, map_location="cpu", weights_only=True)
    return loaded
