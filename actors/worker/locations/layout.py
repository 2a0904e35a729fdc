"""How a tensor-parallel rank's rows relate to the full-width row, and the way back to TP=1 order.

A rank holds of a value either all of it, a slice of its features, or a partial sum. A fused projection's slice is a
row of slices (query, key, value; gate, up): each is gathered on its own, so that the full row has TP=1 order. Where a
value has fewer key-value heads than there are ranks, neighbouring ranks hold the same heads and every copy but the
first is dropped.

Gathering is a collective: every rank must call `gather_full` for the same locations in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.distributed import parallel_state


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One of the values that lie side by side in a row."""

    local: int
    """Features on one rank."""
    full: int
    """Features at TP=1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Where a rank's features belong in the full row."""

    kind: str
    """`replicated`, `sharded` or `partial` (the full row is the sum over the ranks)."""
    parts: tuple[Part, ...] = ()
    """Of a sharded value, in order; more than one for fused projections."""
    label: str = "replicated"
    """In words: `replicated`, `heads`, `qkv fused`, `gate_up fused`, `columns`, `partial sum`."""


REPLICATED = Layout(kind="replicated")


def gather_full(location: Any, shard: Tensor, group: Any = None) -> Tensor:
    """Full-width rows [T, width] in TP=1 order from this rank's rows [T, D].

    Args:
        location: a Location, for its layout.
        shard: this rank's rows, as `read` returned them.
        group: vLLM's group coordinator; the tensor-parallel group by default.
    """
    layout: Layout = location.layout
    if layout.kind == "replicated":
        return shard
    tp = parallel_state.get_tp_group() if group is None else group
    if layout.kind == "partial":
        # all_reduce may work in place on what the model still needs.
        return tp.all_reduce(shard.clone())
    return join_shards(layout, tp.all_gather(shard.contiguous(), 1).chunk(tp.world_size, 1))


def join_shards(layout: Layout, shards: Sequence[Tensor]) -> Tensor:
    """The full-width rows of a sharded value from all ranks' rows, in rank order."""
    joined: list[Tensor] = []
    start = 0
    for part in layout.parts:
        # Ranks that hold the same heads are neighbours.
        copies = part.local * len(shards) // part.full
        joined.extend(shard[:, start : start + part.local] for shard in shards[::copies])
        start += part.local
    return torch.cat(joined, 1)
