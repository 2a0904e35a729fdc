"""Reductions on the device: the rows of each request to one row, in float32, over as many steps as it takes.

A step's rows are reduced as soon as they are taken (`StepReducer`), so that what is kept of a pass is one row a request
and location, whatever its length; `Reductions` joins the steps. Everything is vectorised over the requests of a step,
in an order that the step alone decides, so the same steps give the same bits; nothing waits for the device.

Shape suffixes: M taken rows, B blocks, S requests, E requests that end, D width.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.selection import Reduce
from actors.worker.reduced_requests import StepReduction
from actors.worker.rows import StepTake

# Rows that one thread adds up in turn: a long prompt is cut into blocks, whose sums are added up after. It keeps the
# device busy when a step has one request, and rounding errors small.
BLOCK_ROWS = 64


class StepReducer:
    """Reduces the taken rows of one step, location by location."""

    def __init__(self, step: StepReduction, reduce: Reduce, device: torch.device) -> None:
        self.step = step
        self._kind = "sum" if reduce == "mean" else "max"
        blocks, blocks_of = _blocks(step.lengths)
        self._blocks_B = to_device(blocks, device)
        self._blocks_of_S = None if len(blocks) == len(step.lengths) else to_device(blocks_of, device)
        self.carried = to_device(step.carried, device)
        self.carried_slots = to_device(step.carried_slots, device)
        self.kept = to_device(step.kept, device)
        self.kept_slots = to_device(step.kept_slots, device)
        self.ended = to_device(step.ended, device)
        self.covered_E = to_device(step.covered.astype(np.float32), device)
        self.last_rows_E = to_device(step.last_rows, device)

    def reduce(self, rows_MD: Tensor) -> Tensor:
        """[S, D] float32: sums, or maxima, of each request's rows in this step. A NaN in a column stays one."""
        partial = self._segments(rows_MD.float(), self._blocks_B)
        return partial if self._blocks_of_S is None else self._segments(partial, self._blocks_of_S)

    def _segments(self, rows: Tensor, lengths: Tensor) -> Tensor:
        # `unsafe` leaves out a check of the lengths, for which the host would wait.
        return torch.segment_reduce(rows.contiguous(), self._kind, lengths=lengths, axis=0, unsafe=True)


class Reductions:
    """One rank's reductions: the reducer of each step, and what waits between steps. Grows on demand.

    Args:
        reduce: what becomes of a request's rows; None where they stay as they are.
        store_dtype: dtype of the rows handed out.
        device: of the model.
    """

    def __init__(self, reduce: Reduce | None, *, store_dtype: torch.dtype, device: torch.device) -> None:
        self._reduce = reduce
        self._store_dtype = store_dtype
        self._device = device
        self._slots: dict[str, Tensor] = {}

    def begin_step(self, take: StepTake | None) -> StepReducer | None:
        """The reducer of a step, None where its rows stay as they are."""
        if take is None or take.reduction is None:
            return None
        assert self._reduce is not None
        return StepReducer(take.reduction, self._reduce, self._device)

    @torch.inference_mode()  # what taps hand out may be inference tensors, which change in this mode only
    def end_step(self, location: str, partial_SD: Tensor, reducer: StepReducer) -> Tensor:
        """Join a step's partial results with earlier ones.

        Args:
            location: its name.
            partial_SD: of `reducer.reduce`; changed in place.
            reducer: of the same step.

        Returns:
            [E, D] in the store's dtype, the rows of the requests that end.
        """
        step = reducer.step
        if len(step.carried) or len(step.kept):
            slots = self._room(location, step.n_slots, partial_SD)
            if len(step.carried):
                before = slots.index_select(0, reducer.carried_slots)
                now = partial_SD.index_select(0, reducer.carried)
                joined = before + now if self._reduce == "mean" else torch.maximum(before, now)
                partial_SD.index_copy_(0, reducer.carried, joined)
            if len(step.kept):
                slots.index_copy_(0, reducer.kept_slots, partial_SD.index_select(0, reducer.kept))
        rows_ED = partial_SD.index_select(0, reducer.ended)
        if self._reduce == "mean":
            rows_ED.div_(reducer.covered_E.unsqueeze(1))
        return rows_ED.to(self._store_dtype)

    def _room(self, location: str, n_slots: int, like: Tensor) -> Tensor:
        slots = self._slots.get(location)
        if slots is None or len(slots) < n_slots:
            grown = torch.zeros(2 * n_slots, like.shape[1], dtype=torch.float32, device=like.device)
            if slots is not None:
                grown[: len(slots)] = slots
            slots = self._slots[location] = grown
        return slots


def to_device(values: NDArray[Any], device: torch.device) -> Tensor:
    """A host array on the device; the host does not wait."""
    tensor = torch.from_numpy(values)
    if device.type == "cpu" or not len(values):
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def _blocks(lengths: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """[B] rows of each block, and [S] blocks of each request: whole blocks, then a shorter one at its end."""
    blocks_of = -(-lengths // BLOCK_ROWS)
    blocks = np.full(int(blocks_of.sum()), BLOCK_ROWS, np.int64)
    blocks[np.cumsum(blocks_of) - 1] = lengths - (blocks_of - 1) * BLOCK_ROWS
    return blocks, blocks_of
