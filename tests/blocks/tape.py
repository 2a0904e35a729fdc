"""A recorder for machines without CUDA graphs: it notes every operation and makes the same calls again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from actors.worker.blocks.graph_recording import ATTENTIONS, CACHE_UPDATES, Replay, Rows, Segments, StepCalls


class _TapeSegments(Segments):
    def __init__(self, rows: Rows) -> None:
        super().__init__(rows)
        self._open: list[Callable[[], None]] = []

    def begin(self) -> None:
        self._open = []

    def end(self) -> None:
        calls = self._open

        def replay(n_rows: int) -> None:
            for call in calls:
                call()

        self.parts.append(replay)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func._schema.name not in (*CACHE_UPDATES, *ATTENTIONS):
            self._open.append(_again(func, args, kwargs or {}, result))
        return result


def _again(func: Any, args: Any, kwargs: Any, result: Any) -> Callable[[], None]:
    fresh = [
        tensor
        for tensor, declared in zip(tree_leaves(result), func._schema.returns, strict=False)
        if isinstance(tensor, Tensor) and declared.alias_info is None
    ]
    if not fresh and not func._schema.is_mutable:
        return lambda: None  # a view: it shows what its base holds

    def call() -> None:
        value = func(*args, **kwargs)
        if fresh:
            for old, new in zip(fresh, [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)], strict=True):
                old.copy_(new)

    return call


class TapeRecorder:
    """See the module."""

    def __init__(self, device: Any = None) -> None:
        pass

    def prepare(self, run: Callable[[], Any], rows: Rows) -> Any:
        """See Recorder."""
        with StepCalls(rows):
            return run()

    def record(self, run: Callable[[], Any], rows: Rows) -> tuple[Replay, Any]:
        """See Recorder."""
        segments = _TapeSegments(rows)
        segments.begin()
        with segments:
            value = run()
        segments.end()
        return segments.replay, value
