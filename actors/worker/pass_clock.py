"""PassClock: how long the device works on each pass, from events in its stream, read long after without a wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch


def _timing_event() -> Any:
    return torch.cuda.Event(enable_timing=True)


class PassClock:
    """Marks passes on the current stream: `begin`, `end_forward`, `end_snapshot`. The ends without a beginning do
    nothing.
    """

    def __init__(self, make_event: Callable[[], Any] = _timing_event) -> None:
        self._make_event = make_event
        self.reset()

    def reset(self) -> None:
        """Forget the passes so far."""
        self._marks: list[Any] = []
        self._passes: deque[list[Any]] = deque()
        self._forward_s = self._snapshot_s = 0.0

    def begin(self) -> None:
        """The pass's kernels follow; a pass that was not ended is forgotten."""
        self._marks = []
        self._mark()

    def end_forward(self) -> None:
        """The pass's own kernels are launched."""
        if self._marks:
            self._mark()

    def end_snapshot(self) -> None:
        """The kernels that gather its rows are launched."""
        if self._marks:
            self._mark()
            self._passes.append(self._marks)
        self._marks = []

    def _mark(self) -> None:
        event = self._make_event()
        event.record()
        self._marks.append(event)

    def seconds(self) -> tuple[float, float]:
        """Device seconds of forwards and snapshots so far, of the passes that the device has finished."""
        while self._passes and self._passes[0][2].query():
            begun, computed, taken = self._passes.popleft()
            self._forward_s += begun.elapsed_time(computed) / 1e3
            self._snapshot_s += computed.elapsed_time(taken) / 1e3
        return self._forward_s, self._snapshot_s
