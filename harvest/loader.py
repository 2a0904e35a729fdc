"""RowLoader: shuffled batches of a run's rows for training, read by threads ahead of the trainer.

How rows are shuffled says `row_order.py`. Prompts were shuffled before they were packed, so that neighbours in a block
are unrelated.

Invariants:
- an epoch hands out each stored row once over all ranks, but for the last rows: those of a batch that is not full, and
  those by which one rank has more than another. Ranks get equally many batches: none waits for another at a collective;
- the order follows from (seed, epoch, ranks, sizes) and the store alone: a loader with the same arguments that is given
  `state_dict()` goes on with the very next batch, without reading what went before;
- no rows are in memory but two windows, and a few batches that are ready.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from harvest.errors import LoaderError
from harvest.row_order import RowOrder
from harvest.row_windows import WaitingRows, Window, WindowReader
from harvest.stored_rows import Ints, PlannedRows
from storage.reader import StoreReader

LABELS = {
    "token_ids": "tokens/id",
    "positions": "tokens/position",
    "invokes": "tokens/invoke",
    "logprobs": "tokens/logprob",
}
"""Names of labels in a batch, and the arrays that they come from."""
_READY_BATCHES = 4
_FOLLOW_S = 2.0


class RowLoader(IterableDataset[Any]):
    """Iterate over it for one epoch; each further iteration is the next epoch, in another order.

    Batches are tensors [batch_size, width] for one location given by name, and dicts of such by location for a list;
    with `labels`, dicts that also have `token_ids`, `positions` (int32), `invokes` (int64) and, where the run has them,
    `logprobs` (float32, NaN in prompts), [batch_size] each. A batch is the caller's to write to.

    Iterating again after a `break` goes on with the next batch. A torch `DataLoader` over it takes `batch_size=None`,
    and `set_epoch` before each epoch; its worker processes add nothing that the threads of this class do not do.

    Args:
        run: a run folder, finished or not, or a reader of one.
        locations: a name (alias, array or path), or several.
        batch_size: rows of a batch.
        shuffle: False: in the store's order.
        seed: of the order.
        rank: which of `world_size` trainers this is; each gets rows of its own.
        world_size: trainers.
        labels: hand out what is known of each row.
        dtype: of the rows; None: as stored.
        device: where batches are put, from pinned memory, without a wait; None: they stay on the host.
        drop_last: leave out a last batch that is not full; always so with several ranks.
        buffer_bytes: host memory for rows: the larger, the better they are mixed.
        block_bytes: read at a time.
        follow: read units as they are committed while the run goes on, each once, and end with the run.

    Raises:
        LoaderError: an argument that cannot be used, by name.
        StorageError: no such location; later, a damaged store.
    """

    def __init__(
        self,
        run: StoreReader | Path | str,
        locations: str | Iterable[str],
        *,
        batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        labels: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        drop_last: bool = True,
        buffer_bytes: int = 512 << 20,
        block_bytes: int = 4 << 20,
        follow: bool = False,
    ) -> None:
        self._reader = run if isinstance(run, StoreReader) else StoreReader(run)
        self._single = isinstance(locations, str)
        names = [locations] if isinstance(locations, str) else list(locations)
        if not names:
            raise LoaderError("locations is empty: name one or more of the run's locations")
        layout = self._reader.layout
        self._labels = {name: path for name, path in LABELS.items() if labels and path in layout.arrays}
        if taken := sorted(self._labels.keys() & set(names)):
            raise LoaderError(f"{', '.join(taken)}: a label has this name; use another name of the location")
        self._arrays = {name: self._reader.location(name).array for name in names} | self._labels
        if not 0 <= rank < world_size:
            raise LoaderError(f"rank = {rank} is not one of world_size = {world_size} ranks: 0 to {world_size - 1}")
        if batch_size < 1:
            raise LoaderError(f"batch_size = {batch_size}: give at least 1")
        self._batch_size = batch_size
        self._rank, self._world_size = rank, world_size
        self._dtype = dtype
        self._device = None if device is None else torch.device(device)
        self._drop_last = drop_last
        self._follow = follow
        row_bytes = sum(layout.array(path).row_bytes for path in self._arrays.values())
        # A compressed chunk is decoded whole, so a block is a number of chunks.
        chunk_rows = layout.chunk_rows if layout.compression is not None else 1
        block_rows = max(1, block_bytes // (row_bytes * chunk_rows)) * chunk_rows
        # Two windows are in memory: one is handed out while the next is read.
        window_blocks = max(1, buffer_bytes // 2 // (block_rows * row_bytes))
        self._order = RowOrder(seed=seed, shuffle=shuffle, block_rows=block_rows, window_blocks=window_blocks)
        self._epoch = self._batch = 0
        self._iterations = 0

    @cached_property
    def _planned(self) -> PlannedRows:
        return PlannedRows(self._reader)

    # -- where it is -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where the trainer is: what `load_state_dict` of a loader with the same arguments needs to go on."""
        return {"epoch": self._epoch, "batch": self._batch, "order": self._what_orders()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another loader was.

        Raises:
            LoaderError: it read another run, or in another order.
        """
        mine = self._what_orders()
        differ = [
            f"{key} was {value!r}, is {mine.get(key)!r}"
            for key, value in state["order"].items()
            if value != mine.get(key)
        ]
        if differ:
            raise LoaderError(f"the loader whose state this is had rows in another order: {'; '.join(differ)}")
        self._epoch, self._batch = state["epoch"], state["batch"]

    def set_epoch(self, epoch: int) -> None:
        """Begin the next iteration with this epoch's first batch."""
        self._epoch, self._batch = epoch, 0

    def _what_orders(self) -> dict[str, Any]:
        return {
            "plan": self._reader.layout.plan_hash,
            **asdict(self._order),
            "batch_size": self._batch_size,
            "rank": self._rank,
            "world_size": self._world_size,
            "follow": self._follow,
            # Another set of units is another shuffle.
            "units": None if self._follow else len(self._reader.committed),
        }

    @property
    def n_rows(self) -> int:
        """Rows that are stored so far."""
        return sum(map(self._reader.stored_rows, self._reader.committed))

    def __len__(self) -> int:
        """Batches of an epoch, for this rank."""
        if self._follow:
            raise TypeError("a loader that follows a run does not know its length")
        stored = self._planned.stored(self._reader.commit_order)
        share = self._order.share(stored, epoch=self._epoch, group=0, rank=self._rank, world_size=self._world_size)
        return self._n_batches(share.rows_of_ranks, ended=True)

    def _n_batches(self, rows_of_ranks: Ints, *, ended: bool) -> int:
        rows = int(rows_of_ranks.min())
        if ended and not self._drop_last and len(rows_of_ranks) == 1:
            return -(-rows // self._batch_size)
        return rows // self._batch_size

    # -- iteration -------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        rank, world_size = self._rank, self._world_size
        worker = get_worker_info()
        if worker is not None:
            # A DataLoader's processes share this rank's rows. One thread of this class does as much as several of them.
            rank, world_size = rank * worker.num_workers + worker.id, world_size * worker.num_workers
        self._iterations += 1
        iteration, epoch = self._iterations, self._epoch
        ready: queue.Queue[Any] = queue.Queue(_READY_BATCHES)
        stopped = threading.Event()
        device = self._current_device()
        produce = partial(self._produce, epoch, self._batch, (rank, world_size), device, ready, stopped)
        thread = threading.Thread(target=produce, name="harvest-loader", daemon=True)
        thread.start()
        try:
            while (item := ready.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                if iteration != self._iterations:
                    raise LoaderError("another iteration over this loader has begun: make a loader for each")
                self._batch += 1
                yield self._placed(item, device)
            self._epoch, self._batch = epoch + 1, 0
        finally:
            stopped.set()
            thread.join()

    def forever(self) -> Iterator[Any]:
        """Batches of epoch after epoch."""
        while True:
            yield from self

    def _current_device(self) -> torch.device | None:
        """The device by number: another thread's current device is not this one's."""
        if self._device is None or self._device.type != "cuda" or self._device.index is not None:
            return self._device
        return torch.device("cuda", torch.cuda.current_device())

    def _placed(self, batch: dict[str, Tensor], device: torch.device | None) -> Any:
        if device is not None:
            batch = {name: values.to(device, non_blocking=True) for name, values in batch.items()}
        if self._dtype is not None:
            batch = {name: x if name in self._labels else x.to(self._dtype) for name, x in batch.items()}
        return next(iter(batch.values())) if self._single and not self._labels else batch

    def _produce(
        self,
        epoch: int,
        first: int,
        ranks: tuple[int, int],
        device: torch.device | None,
        ready: queue.Queue[Any],
        stopped: threading.Event,
    ) -> None:
        """The reading thread: puts batches, then None or what went wrong."""

        def put(item: Any) -> bool:
            while not stopped.is_set():
                try:
                    ready.put(item, timeout=0.1)
                    return True
                except queue.Full:
                    continue
            return False

        on_gpu = device is not None and device.type == "cuda"
        try:
            if on_gpu:
                torch.cuda.set_device(device)  # or pinning would make a context on the first of them
            planned_rows = self._reader.layout.n_rows
            window_rows = min(planned_rows, self._order.window_blocks * self._order.block_rows)
            batch_rows = min(planned_rows, self._batch_size)
            # Those that are ready, the one in the trainer's hands and the one that is filled.
            waiting = WaitingRows(max_rows=batch_rows, spare_batches=_READY_BATCHES + 2, pin_memory=on_gpu)
            with WindowReader(self._reader, self._arrays, max_rows=window_rows) as windows:
                for batch in self._batches(epoch, first, ranks, windows, waiting, stopped):
                    if not put(batch):
                        return
            put(None)
        except BaseException as error:
            put(error)

    def _batches(
        self,
        epoch: int,
        first: int,
        ranks: tuple[int, int],
        reader: WindowReader,
        waiting: WaitingRows,
        stopped: threading.Event,
    ) -> Iterator[dict[str, Tensor]]:
        size = self._batch_size
        n_done, skip = first, first * size
        rows_of_ranks = np.zeros(ranks[1], np.int64)
        for group, (units, ended) in enumerate(self._groups(stopped)):
            stored = self._planned.stored(units)
            share = self._order.share(stored, epoch=epoch, group=group, rank=ranks[0], world_size=ranks[1])
            rows_of_ranks += share.rows_of_ranks
            n_batches = self._n_batches(rows_of_ranks, ended=ended)
            reads: list[Callable[[], Window]] = []
            skips: list[int] = []
            for number, blocks in enumerate(share.windows):
                n_rows = int(blocks.counts.sum())
                if skip < n_rows:
                    order = partial(self._order.within, n_rows, epoch=epoch, group=group, window=number, rank=ranks[0])
                    reads.append(partial(reader.read, stored, blocks, order))
                    skips.append(skip)
                skip = max(0, skip - n_rows)
            for window, begin in zip(reader.in_turn(reads), skips, strict=True):
                waiting.add(window, begin)
                while n_done < n_batches and len(waiting) >= size:
                    yield waiting.take(size)
                    n_done += 1
                if stopped.is_set():
                    return
                if len(waiting) < size:
                    waiting.release()
            # Where ranks differ, more than a batch may have waited for the others' rows.
            while n_done < n_batches and len(waiting):
                yield waiting.take(min(size, len(waiting)))
                n_done += 1

    def _groups(self, stopped: threading.Event) -> Iterator[tuple[list[int], bool]]:
        """Units that are shuffled together, and whether they are the last."""
        if not self._follow:
            yield self._reader.commit_order, True
            return
        # Groups follow from the ledger's order alone, whenever this looks.
        enough = 2 * self._order.window_blocks * self._order.block_rows * self._world_size
        n_seen, is_last = 0, False
        while not stopped.is_set():
            self._reader.refresh()
            complete, order = self._reader.complete, self._reader.commit_order
            while n_seen < len(order):
                sizes = np.cumsum([self._reader.stored_rows(unit) for unit in order[n_seen:]])
                n_units = int(np.searchsorted(sizes, enough)) + 1
                if n_units > len(sizes) and not complete:
                    break
                group, n_seen = order[n_seen : n_seen + n_units], min(n_seen + n_units, len(order))
                is_last = complete and n_seen == len(order)
                yield group, is_last
            if complete:
                if not is_last:
                    yield [], True
                return
            stopped.wait(_FOLLOW_S)
