"""How a location's tensors are spread over the ranks of a tensor-parallel engine.

Blocks see every value full-width and in TP=1 order, on all ranks alike; what they write goes back as each rank's own
part. The layouts come from two weightless twins of the model, one at TP=1 and one as a rank sees it: where a shape
differs, the value is sharded there; a fused projection's slices are told apart by its own sizes; a row-parallel
output that is not reduced is a partial sum.

Gathering is a collective: all ranks serve the same blocks at the same locations in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.distributed import parallel_state
from vllm.model_executor.layers.linear import LinearBase, RowParallelLinear

from actors.worker.blocks.errors import LocationError
from actors.worker.locations.layout import Layout, Part
from actors.worker.locations.values import TensorValue
from actors.worker.locations.view import ModelView, view_model

Rows = Callable[[Any, Any], Any]


class SiteLayout:
    """The layout of one site: how to make its value whole, and how to cut it up again.

    `tree` has the structure of the site's value, with (axis, Layout) in the place of tensors that are spread.
    """

    def __init__(self, name: str, tree: Any) -> None:
        self._name = name
        self._tree = tree
        self._spread = _any_spread(tree)

    def gather(self, value: Any) -> Any:
        """The value at full width; the same on all ranks.

        Raises:
            LocationError: the layout is not known.
        """
        if isinstance(self._tree, LocationError):
            raise LocationError(*self._tree.args)
        return _map(self._gather_one, value, self._tree) if self._spread else value

    def scatter(self, full: Any, value: Any, *, in_place: bool) -> Any:
        """This rank's part of `full`: written into `value`, or as a new structure."""
        if not self._spread:
            return full
        parts = _map(self._part_of, full, self._tree)
        if not in_place:
            return parts
        _copy_into(value, parts)
        return value

    def _gather_one(self, tensor: Tensor, spread: tuple[int, Layout] | None) -> Tensor:
        if spread is None:
            return tensor
        axis, layout = spread
        group = parallel_state.get_tp_group()
        if layout.kind == "partial":
            # all_reduce may work in place on what the model still needs.
            return group.all_reduce(tensor.clone())
        shards = group.all_gather(tensor.contiguous(), axis).chunk(group.world_size, axis)
        joined: list[Tensor] = []
        start = 0
        for part in layout.parts:
            # Ranks that hold the same heads are neighbours.
            copies = part.local * len(shards) // part.full
            joined.extend(shard.narrow(axis, start, part.local) for shard in shards[::copies])
            start += part.local
        return torch.cat(joined, axis)

    def _part_of(self, full: Tensor, spread: tuple[int, Layout] | None) -> Tensor:
        if spread is None:
            return full
        axis, layout = spread
        group = parallel_state.get_tp_group()
        if layout.kind == "partial":
            # The ranks' parts are summed later: one of them brings the whole.
            return full if group.rank_in_group == 0 else torch.zeros_like(full)
        pieces: list[Tensor] = []
        start = 0
        for part in layout.parts:
            copies = part.local * group.world_size // part.full
            pieces.append(full.narrow(axis, start + group.rank_in_group // copies * part.local, part.local))
            start += part.full
        return torch.cat(pieces, axis)


class Layouts:
    """The layouts of all sites of a loaded model; made once, outside of any forward pass."""

    def __init__(self, model: nn.Module, vllm_config: VllmConfig, tp_size: int) -> None:
        self._view = view_model(model, vllm_config, tp_size)
        self._partial = _partial_sums(self._view)
        self._fused = _fused_parts(self._view)

    def of(self, name: str, path: str, side: str) -> SiteLayout:
        """The layout of one side ("input" or "output") of the module at `path`."""
        try:
            # A module that layers share was observed under one of its paths, once for each layer.
            observed = self._view.paths.get(id(self._view.model.get_submodule(path)), path)
        except AttributeError:
            observed = path
        whole = self._view.values.calls.get(observed, ())
        shard = self._view.shard_values.calls.get(observed, ())
        if not whole or len(whole) != len(shard):
            return SiteLayout(
                name, LocationError(f"{name}: how its value is spread over the ranks is not known; use one rank")
            )
        first, other = whole[0], shard[0]
        if side == "output":
            return SiteLayout(name, self._tree(name, path, first.output, other.output))
        return SiteLayout(name, self._tree(name, path, (first.args, first.kwargs), (other.args, other.kwargs)))

    def _tree(self, name: str, path: str, whole: Any, shard: Any) -> Any:
        if isinstance(whole, TensorValue) and isinstance(shard, TensorValue):
            return self._spread(name, path, whole, shard)
        if isinstance(whole, tuple) and isinstance(shard, tuple):
            items = [self._tree(name, path, one, other) for one, other in zip(whole, shard, strict=True)]
            return next((item for item in items if isinstance(item, LocationError)), tuple(items))
        if isinstance(whole, dict) and isinstance(shard, dict):
            named = {key: self._tree(name, path, whole[key], shard[key]) for key in whole}
            return next((item for item in named.values() if isinstance(item, LocationError)), named)
        return None

    def _fused_widths_beside(self, path: str) -> set[int]:
        """Full widths of the fused projections in the module that holds `path`."""
        parent = self._view.model.get_submodule(path.rpartition(".")[0])
        return {
            sum(child.output_partition_sizes)
            for child in parent.children()
            if isinstance(child, LinearBase) and len(child.output_partition_sizes) > 1
        }

    def _spread(self, name: str, path: str, whole: TensorValue, shard: TensorValue) -> Any:
        if shard.identity in self._partial:
            return (0, Layout(kind="partial", label="partial sum"))
        axes = [axis for axis, (a, b) in enumerate(zip(whole.shape, shard.shape, strict=True)) if a != b]
        if not axes:
            return None
        axis = axes[0]
        parts = self._fused.get(whole.identity)
        if parts is None:
            if whole.shape[axis] in self._fused_widths_beside(path):
                return LocationError(
                    f"{name}: it has the width of a fused projection but is another tensor, so the order of its "
                    "features over the ranks is not known; read the projection's own output, or use one rank"
                )
            parts = (Part(local=shard.shape[axis], full=whole.shape[axis]),)
        if len(axes) > 1 or any(part.local * self._view.tp_size % part.full for part in parts):
            return LocationError(f"{name}: how its value is spread over the ranks is not known; use one rank")
        return (axis, Layout(kind="sharded", parts=parts, label="columns"))


def _partial_sums(view: ModelView) -> set[int]:
    """Identities of tensors that still have to be summed over the ranks."""
    return {
        tensor.identity
        for path, module in view.shard.named_modules()
        if isinstance(module, RowParallelLinear) and not module.reduce_results
        for call in view.shard_values.calls.get(path, ())
        for tensor in _tensors(call.output)
    }


def _fused_parts(view: ModelView) -> dict[int, tuple[Part, ...]]:
    """The parts of fused projections' outputs, by identity in the TP=1 pass."""
    fused: dict[int, tuple[Part, ...]] = {}
    for path, module in view.model.named_modules():
        if not isinstance(module, LinearBase) or len(module.output_partition_sizes) < 2:
            continue
        local: Any = view.shard.get_submodule(path)
        sizes = zip(local.output_partition_sizes, module.output_partition_sizes, strict=True)
        parts = tuple(Part(local=mine, full=full) for mine, full in sizes)
        for call in view.values.calls.get(path, ()):
            for tensor in _tensors(call.output)[:1]:
                fused[tensor.identity] = parts
    return fused


def _tensors(value: Any) -> list[TensorValue]:
    if isinstance(value, TensorValue):
        return [value]
    if isinstance(value, tuple):
        return [tensor for part in value for tensor in _tensors(part)]
    if isinstance(value, dict):
        return [tensor for part in value.values() for tensor in _tensors(part)]
    return []


def _any_spread(tree: Any) -> bool:
    if isinstance(tree, dict):
        return any(_any_spread(item) for item in tree.values())
    if isinstance(tree, tuple):
        return any(isinstance(item, Layout) or _any_spread(item) for item in tree)
    return False


def _map(function: Callable[[Tensor, Any], Tensor], value: Any, tree: Any) -> Any:
    """`value` with `function(tensor, spread)` in the place of its tensors."""
    if isinstance(value, Tensor):
        return function(value, tree)
    if isinstance(value, (tuple, list)):
        if tree is None:
            return value
        items = [_map(function, item, part) for item, part in zip(value, tree, strict=True)]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict):
        return value if tree is None else {key: _map(function, item, tree.get(key)) for key, item in value.items()}
    return value


def _copy_into(value: Any, parts: Any) -> None:
    if isinstance(value, Tensor):
        if value is not parts:
            value.copy_(parts)
    elif isinstance(value, (tuple, list)):
        for item, part in zip(value, parts, strict=True):
            _copy_into(item, part)
    elif isinstance(value, dict):
        for key, item in value.items():
            _copy_into(item, parts[key])
