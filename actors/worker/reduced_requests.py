"""ReducedRequests: which requests of a step begin, carry on or end their reduction to one row. Pure numpy.

A request whose positions all pass in one step needs no memory beyond it. One that is spread over steps (chunked
prefill, a preemption in between) holds a slot, in which its partial result waits on the device.

Invariants:
- a slot belongs to one request at a time, and is free again when that request ends or is forgotten;
- a slot that is freed in a step is not handed out in it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from actors.worker.step import StepRowsError


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReduction:
    """How one step's taken rows become partial results, and those become rows. S requests, E of which end."""

    lengths: NDArray[np.int64]
    """[S] taken rows of each request, which lie one after the other; none is 0."""
    carried: NDArray[np.int64]
    """Requests (0..S-1) that have a partial result from earlier steps, in `carried_slots`."""
    carried_slots: NDArray[np.int64]
    kept: NDArray[np.int64]
    """Requests whose partial result must wait for a later step, in `kept_slots`."""
    kept_slots: NDArray[np.int64]
    ended: NDArray[np.int64]
    """[E] requests whose last position is in this step."""
    covered: NDArray[np.int64]
    """[E] positions that each covers in all, over all steps."""
    last_rows: NDArray[np.int64]
    """[E] index among the step's taken rows of each one's last row."""
    n_slots: int
    """Slots that are, or were ever, in use: all slots are below."""


@dataclass(slots=True)
class StepReductions:
    """Collects the requests of one step; made by `ReducedRequests.begin_step`."""

    _requests: ReducedRequests
    _lengths: list[int] = field(default_factory=list)
    _carried: list[tuple[int, int]] = field(default_factory=list)
    _kept: list[tuple[int, int]] = field(default_factory=list)
    _ended: list[tuple[int, int]] = field(default_factory=list)
    _freed: list[str] = field(default_factory=list)

    def add(self, request_id: str, count: int, *, covered: int, of: int) -> None:
        """Take in the next request of the step's order.

        Args:
            request_id: its name.
            count: positions of it in this step, at least 1.
            covered: positions of it up to now, this step's included.
            of: positions of it in all.
        """
        index = len(self._lengths)
        self._lengths.append(count)
        slot = self._requests.slots.get(request_id)
        if slot is not None:
            self._carried.append((index, slot))
        if covered == of:
            self._ended.append((index, of))
            self._freed.append(request_id)
            return
        if slot is None:
            slot = self._requests.hold(request_id)
        self._kept.append((index, slot))

    def finish(self, *, n_rows: int) -> StepReduction | None:
        """The whole step of `n_rows` taken rows, None if no request of it is reduced.

        Slots of requests that ended are free from now on. Raises `StepRowsError` where only some are reduced.
        """
        if not self._lengths:
            return None
        if sum(self._lengths) != n_rows:
            raise StepRowsError("a step mixes requests whose rows are reduced with such whose rows are not")
        for request_id in self._freed:
            self._requests.forget(request_id)
        lengths = np.array(self._lengths, np.int64)
        ended, covered = _columns(self._ended)
        carried, carried_slots = _columns(self._carried)
        kept, kept_slots = _columns(self._kept)
        return StepReduction(
            lengths=lengths,
            carried=carried,
            carried_slots=carried_slots,
            kept=kept,
            kept_slots=kept_slots,
            ended=ended,
            covered=covered,
            last_rows=np.cumsum(lengths)[ended] - 1,
            n_slots=self._requests.n_slots,
        )


class ReducedRequests:
    """The slots of the requests in flight."""

    def __init__(self) -> None:
        self.slots: dict[str, int] = {}
        """Slot of each request with a partial result."""
        self.n_slots = 0
        """Slots ever made: what the device must have room for."""
        self._free: list[int] = []

    def begin_step(self) -> StepReductions:
        """Begin to collect a step."""
        return StepReductions(self)

    def hold(self, request_id: str) -> int:
        """A slot for a request that has none."""
        if not self._free:
            self._free.append(self.n_slots)
            self.n_slots += 1
        slot = self.slots[request_id] = self._free.pop()
        return slot

    def forget(self, request_id: str) -> None:
        """Free a request's slot, if it has one."""
        slot = self.slots.pop(request_id, None)
        if slot is not None:
            self._free.append(slot)


def _columns(pairs: list[tuple[int, int]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    table = np.array(pairs, np.int64).reshape(-1, 2)
    return table[:, 0].copy(), table[:, 1].copy()
