"""The layout of a location over tensor-parallel ranks, from what one rank's pass and the TP=1 pass show.

A value of the same width on both is replicated, unless it is a row-parallel product that nobody has summed yet. A
narrower one is a slice; if it is the very tensor that a fused projection returned, it is as many slices as the
projection has parts.
"""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import LinearBase, RowParallelLinear

from actors.location_errors import UnreadableLocation
from actors.worker.locations.layout import REPLICATED, Layout, Part
from actors.worker.locations.values import TensorValue, Value
from actors.worker.locations.view import ModelView
from actors.worker.locations.walk import source_of, tensor_at


def layout_of(
    view: ModelView, path: str, side: str, element: tuple[int | str, ...], value: TensorValue, named: str
) -> Layout:
    if view.tp_size == 1:
        return REPLICATED
    source, _ = source_of(view, view.shard_values, path, "output" if side == "output" else "inputs", element, named)
    local = tensor_at(view, source, element, path, side, named)
    assert local.width is not None and value.width is not None
    if local.identity in _partial_sums(view):
        return Layout(kind="partial", label="partial sum")
    if local.width == value.width:
        return REPLICATED
    fused = _fused(view)
    if value.identity in fused:
        label, parts = fused[value.identity]
    elif any(sum(part.full for part in parts) == value.width for _, parts in _siblings(view, path)):
        raise UnreadableLocation(
            f"{named}: it has the width of a fused projection but is another tensor, so the order of its features over "
            f"{view.tp_size} ranks is not known; read the projection's own output, or use one rank"
        )
    else:
        label = "heads" if isinstance(view.model.get_submodule(path), Attention) else "columns"
        parts = (Part(local=local.width, full=value.width),)
    fits = all(part.local * view.tp_size % part.full == 0 and part.local <= part.full for part in parts)
    if not fits or sum(part.full for part in parts) != value.width or sum(part.local for part in parts) != local.width:
        raise UnreadableLocation(
            f"{named}: {local.width} features on a rank do not make up {value.width} over {view.tp_size} ranks"
        )
    return Layout(kind="sharded", parts=parts, label=label)


def _partial_sums(view: ModelView) -> set[int]:
    """Identities of tensors that still have to be summed over the ranks."""
    return {
        tensor.identity
        for path, module in view.shard.named_modules()
        if isinstance(module, RowParallelLinear) and not module.reduce_results
        for call in view.shard_values.calls.get(path, ())
        for tensor in _tensors(call.output)
    }


def _fused(view: ModelView) -> dict[int, tuple[str, tuple[Part, ...]]]:
    """Label and parts of fused projections' outputs, by identity in the TP=1 pass."""
    fused: dict[int, tuple[str, tuple[Part, ...]]] = {}
    for path, module in view.model.named_modules():
        parts = _parts(view, path, module)
        if len(parts) > 1:
            label = "qkv fused" if len(parts) == 3 else "gate_up fused"
            for call in view.values.calls.get(path, ()):
                for tensor in _tensors(call.output)[:1]:
                    fused[tensor.identity] = (label, parts)
    return fused


def _siblings(view: ModelView, path: str) -> list[tuple[str, tuple[Part, ...]]]:
    parent = view.model.get_submodule(path.rpartition(".")[0])
    prefix = path.rpartition(".")[0]
    named = ((f"{prefix}.{name}", child) for name, child in parent.named_children())
    return [("", parts) for child_path, child in named if len(parts := _parts(view, child_path, child)) > 1]


def _parts(view: ModelView, path: str, module: Any) -> tuple[Part, ...]:
    if not isinstance(module, LinearBase):
        return ()
    full = module.output_partition_sizes
    local: Any = view.shard.get_submodule(path)
    return tuple(Part(local=mine, full=whole) for mine, whole in zip(local.output_partition_sizes, full, strict=True))


def _tensors(value: Value) -> list[TensorValue]:
    if isinstance(value, TensorValue):
        return [value]
    if isinstance(value, tuple):
        return [tensor for part in value for tensor in _tensors(part)]
    if isinstance(value, dict):
        return [tensor for part in value.values() for tensor in _tensors(part)]
    return []
