"""Heartbeat: tells engines that their driver lives, from a thread of its own.

The driver's loop may be held for minutes by one commit on a slow file system. Engines end themselves when they hear
nothing for `EngineSpec.driver_silence_s`, which must mean that the driver is gone or cut off, not that it is busy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Heartbeat:
    """Calls `beat` every `interval_s` seconds until `stop`. What it raises ends neither the thread nor the driver."""

    def __init__(self, beat: Callable[[], None], *, interval_s: float) -> None:
        self._beat = beat
        self._interval_s = interval_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="harvest-heartbeat", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval_s):
            try:
                self._beat()
            except Exception:
                # An engine that cannot be told is found dead by the driver's own calls.
                continue

    def stop(self) -> None:
        """No beat begins after this."""
        self._stopped.set()
        self._thread.join()
