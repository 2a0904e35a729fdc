"""Rows of all ranks joined to TP=1 order, on plain tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from actors.worker.locations.layout import Layout, Part, gather_full, join_shards


class Group:
    """All ranks of a group in one process: what each would hold is known."""

    def __init__(self, shards: list[Tensor]) -> None:
        self.world_size = len(shards)
        self._shards = shards

    def all_gather(self, shard: Tensor, dim: int) -> Tensor:
        assert any(torch.equal(shard, known) for known in self._shards)
        return torch.cat(self._shards, dim)

    def all_reduce(self, shard: Tensor) -> Tensor:
        return shard.copy_(torch.stack(self._shards).sum(0))


class At:
    """Stands for a Location of which only the layout matters."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout


@st.composite
def sharded(draw: Any) -> tuple[Layout, Tensor, list[Tensor]]:
    """A fused row of parts, cut as vLLM cuts it: heads in order, few heads repeated on neighbours."""
    ranks = draw(st.sampled_from([1, 2, 4, 8]))
    head_dim = draw(st.integers(1, 3))
    parts: list[Part] = []
    full: list[Tensor] = []
    by_rank: list[list[Tensor]] = [[] for _ in range(ranks)]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    for _ in range(draw(st.integers(1, 3))):
        heads = draw(st.sampled_from([1, 2, 4, 8]))
        value = torch.randn(5, heads * head_dim, generator=generator)
        local = max(1, heads // ranks) * head_dim
        copies = max(1, ranks // heads)
        full.append(value)
        parts.append(Part(local=local, full=value.shape[1]))
        for rank in range(ranks):
            first = rank // copies * local
            by_rank[rank].append(value[:, first : first + local])
    layout = Layout(kind="sharded", parts=tuple(parts))
    return layout, torch.cat(full, 1), [torch.cat(pieces, 1) for pieces in by_rank]


@given(sharded())
def test_shards_join_in_tp1_order(case: tuple[Layout, Tensor, list[Tensor]]) -> None:
    layout, full, shards = case
    assert torch.equal(join_shards(layout, shards), full)
    for shard in shards:
        assert torch.equal(gather_full(At(layout), shard, Group(shards)), full)


def test_replicated_rows_need_no_group() -> None:
    rows = torch.randn(3, 4)
    assert gather_full(At(Layout(kind="replicated")), rows, None) is rows


def test_partial_sums_are_added_beside_the_engines_own_tensor() -> None:
    shards = [torch.randn(3, 4) for _ in range(2)]
    kept = shards[0].clone()
    total = gather_full(At(Layout(kind="partial")), shards[0], Group(shards))
    assert torch.allclose(total, shards[0] + shards[1])
    assert torch.equal(shards[0], kept)


def test_wrong_order_is_seen() -> None:
    """Plain concatenation of fused shards is what a gather must not do."""
    layout = Layout(kind="sharded", parts=(Part(local=2, full=4), Part(local=1, full=2)))
    full = torch.arange(6.0).reshape(1, 6)
    shards = [full[:, [0, 1, 4]], full[:, [2, 3, 5]]]
    assert torch.equal(join_shards(layout, shards), full)
    assert not torch.equal(torch.cat(shards, 1), full)
    with pytest.raises(AssertionError):
        gather_full(At(layout), torch.zeros(1, 3), Group(shards))
