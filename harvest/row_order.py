"""In which order a loader hands out rows: pure, from numbers alone.

Rows are shuffled twice: blocks of consecutive rows over all units, and rows among the blocks of a window, which are in
memory together. Ranks take turns at the blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from harvest.stored_rows import Blocks, Ints, StoredRows


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """What one rank reads of the units that are shuffled together, in windows of blocks."""

    windows: list[Blocks]
    rows_of_ranks: Ints
    """[ranks] rows of each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowOrder:
    """`group` numbers units that are shuffled together: one group, but where a run is followed."""

    seed: int
    shuffle: bool
    block_rows: int
    window_blocks: int

    def share(self, stored: StoredRows, *, epoch: int, group: int, rank: int, world_size: int) -> Share:
        """The blocks of one of `world_size` ranks."""
        blocks = stored.blocks(self.block_rows)
        if self.shuffle:
            blocks = blocks.chosen(self._random(epoch, group).permutation(len(blocks)))
        rows_of_ranks = np.array([blocks.counts[each::world_size].sum() for each in range(world_size)], np.int64)
        mine = blocks.chosen(slice(rank, None, world_size))
        starts = range(0, len(mine), self.window_blocks)
        windows = [mine.chosen(slice(start, start + self.window_blocks)) for start in starts]
        return Share(windows=windows, rows_of_ranks=rows_of_ranks)

    def within(self, n_rows: int, *, epoch: int, group: int, window: int, rank: int) -> Ints:
        """[n_rows] the order of the rows of a window."""
        if not self.shuffle:
            return np.arange(n_rows)
        return self._random(epoch, group, window, rank).permutation(n_rows)

    def _random(self, *numbers: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(np.random.SeedSequence([self.seed, *numbers])))
