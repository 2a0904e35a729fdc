"""StepTimes: what one rank's steps take and hold. Host time is always counted, device time where it is asked for."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from actors.profile import WorkerTimes
from actors.worker.pass_clock import PassClock


class StepTimes:
    """Counts steps, their tokens, and the time of the snapshot on the host.

    Args:
        device: measures passes on the device, None for no measurement.
    """

    def __init__(self, device: PassClock | None) -> None:
        self._device = device
        self.reset()

    def reset(self) -> None:
        """Forget the steps so far: those of the self-test are no harvest."""
        self._n_steps = self._n_tokens = 0
        self._snapshot_s = 0.0
        if self._device is not None:
            self._device.reset()

    @contextmanager
    def choosing(self, n_rows: int) -> Iterator[None]:
        """Around the choice of wanted rows, just before a pass of `n_rows` rows of requests."""
        begun_s = time.perf_counter()
        if self._device is not None:
            self._device.begin()
        self._n_steps += 1
        self._n_tokens += n_rows
        try:
            yield
        finally:
            self._snapshot_s += time.perf_counter() - begun_s

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Around what follows a pass: gathering its rows and handing them on."""
        begun_s = time.perf_counter()
        if self._device is not None:
            self._device.end_forward()
        try:
            yield
        finally:
            if self._device is not None:
                self._device.end_snapshot()
            self._snapshot_s += time.perf_counter() - begun_s

    def joined(self, sink: WorkerTimes, *, copy_s: float) -> WorkerTimes:
        """The counts so far, with those of the sink and of the transfer."""
        forward_s, snapshot_s = self._device.seconds() if self._device is not None else (0.0, 0.0)
        return replace(
            sink,
            copy_s=copy_s,
            n_steps=self._n_steps,
            n_step_tokens=self._n_tokens,
            snapshot_s=self._snapshot_s,
            device_forward_s=forward_s,
            device_snapshot_s=snapshot_s,
        )
