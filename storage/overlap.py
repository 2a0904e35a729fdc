"""Runs the arithmetic on rows (checksums, statistics) beside the write of the same rows.

A write hands the bytes to the kernel without holding the interpreter, so another thread can work meanwhile. Few
threads are enough: checksums hold the interpreter, at a pace that no disk keeps up with.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

WORTHWHILE_BYTES = 1 << 20
"""Below this size the switch of threads costs more than it saves."""

_THREADS = max(2, len(os.sched_getaffinity(0)) // 4)
_pools: dict[int, ThreadPoolExecutor] = {}


def beside(function: Callable[..., None], *arguments: Any, size_bytes: int) -> Callable[[], None]:
    """Start `function(*arguments)` in another thread; the result waits for it and raises what it raised.

    Runs at once, in this thread, where `size_bytes` is too small to be worth it.
    """
    if size_bytes < WORTHWHILE_BYTES:
        function(*arguments)
        return _done
    pool = _pools.get(os.getpid())
    if pool is None:  # also after a fork, which does not take threads along
        pool = _pools.setdefault(os.getpid(), ThreadPoolExecutor(_THREADS, thread_name_prefix="store-arithmetic"))
    future: Future[None] = pool.submit(function, *arguments)
    return future.result


def _done() -> None:
    return None
