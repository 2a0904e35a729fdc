"""Stops a block that runs too long between two locations.

A helper thread raises :class:`BlockTimeoutError` in the forward thread while the block runs there. The lock makes
"the block has yielded" and "the error is sent" exclusive, so the error never lands in the engine's own code. A block
stuck inside one native call cannot be interrupted before that call returns.
"""

from __future__ import annotations

import ctypes
import threading
import time

from actors.worker.blocks.errors import BlockTimeoutError

_set_async_exc = ctypes.pythonapi.PyThreadState_SetAsyncExc
_set_async_exc.argtypes = (ctypes.c_ulong, ctypes.py_object)
_set_async_exc.restype = ctypes.c_int


class Watchdog:
    """Arm before a block runs, disarm after; `limit_s` None switches it off."""

    def __init__(self, limit_s: float | None) -> None:
        if limit_s is not None and not limit_s > 0:
            raise ValueError(f"the time limit of a block must be positive or None, got {limit_s}")
        self.limit_s = limit_s
        self._lock = threading.Lock()
        self._deadline_s: float | None = None
        self._thread_id = 0
        self._fired = False
        self._poller: threading.Thread | None = None
        self._closed = threading.Event()

    def watch_this_thread(self) -> None:
        """Call on the forward thread before blocks run on it."""
        if self.limit_s is not None:
            self._thread_id = threading.get_ident()
            if self._poller is None:
                self._poller = threading.Thread(target=self._poll, name="harvest-block-watchdog", daemon=True)
                self._poller.start()

    def arm(self) -> None:
        """Call before the engine switches to a block."""
        if self.limit_s is not None:
            self._deadline_s = time.monotonic() + self.limit_s

    def disarm(self) -> bool:
        """Call when the block has yielded. True when the limit had struck."""
        if self.limit_s is None:
            return False
        with self._lock:
            self._deadline_s = None
            fired, self._fired = self._fired, False
            if fired:
                # Takes back an error that was sent but has not been raised yet.
                _set_async_exc(self._thread_id, ctypes.py_object())
        return fired

    def close(self) -> None:
        self._closed.set()

    def _poll(self) -> None:
        assert self.limit_s is not None
        period_s = min(0.5, max(0.01, self.limit_s / 10))
        while not self._closed.wait(period_s):
            with self._lock:
                deadline_s = self._deadline_s
                if deadline_s is not None and time.monotonic() > deadline_s:
                    self._fired = True
                    # Sent again at every tick: a block may swallow the first one.
                    _set_async_exc(self._thread_id, BlockTimeoutError)
