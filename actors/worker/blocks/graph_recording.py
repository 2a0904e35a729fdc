"""Recording what a layer launches, so that it can be launched again without its Python code.

A recording is made by running the layer once, for real. Work that depends on the step (attention and the writes to its
cache, which read vLLM's forward context) stays a call between CUDA graphs, as between the pieces of vLLM's own.
All memory that a recording touches is at the same place at every replay.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

# They must read the forward context of each step. An update comes immediately before its attention.
CACHE_UPDATES = ("vllm::unified_kv_cache_update", "vllm::unified_mla_kv_cache_update")
ATTENTIONS = ("vllm::unified_attention_with_output", "vllm::unified_mla_attention_with_output")


class RecordingError(RuntimeError):
    """A layer does something that a recording cannot repeat."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Rows of a pass, and what they are padded to."""

    n: int
    padded: int


Replay = Callable[[int], None]
"""Repeats recorded work for a number of rows, up to those that it was padded to."""


class Recorder(Protocol):
    """Makes recordings."""

    def prepare(self, run: Callable[[], Any], rows: Rows) -> Any:
        """Call `run` where `record` will, so that nothing is set up for the first time while recording."""
        ...

    def record(self, run: Callable[[], Any], rows: Rows) -> tuple[Replay, Any]:
        """Call `run` once; returns what repeats its work, and what it returned.

        Raises:
            RecordingError: it cannot be repeated. Part of the work may have been done.
        """
        ...


class StepCall:
    """A call that depends on the step; it gets the rows of requests only, as it does without padding."""

    __slots__ = ("_arguments", "_func", "_n_rows", "_padded", "_trimmed")

    def __init__(self, func: Any, arguments: tuple[Any, Any], padded: int) -> None:
        self._func = func
        self._arguments = arguments
        self._padded = padded
        self._n_rows = -1

    def __call__(self, n_rows: int) -> Any:
        if n_rows != self._n_rows:
            self._trimmed = tree_map_only(
                Tensor, lambda x: x[:n_rows] if x.shape[:1] == (self._padded,) else x, self._arguments
            )
            self._n_rows = n_rows
        args, kwargs = self._trimmed
        return self._func(*args, **kwargs)


class StepCalls(TorchDispatchMode):
    """Makes the calls that depend on the step, for the rows of requests."""

    def __init__(self, rows: Rows) -> None:
        super().__init__()
        self._rows = rows

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in CACHE_UPDATES or func._schema.name in ATTENTIONS:
            return StepCall(func, (args, kwargs or {}), self._rows.padded)(self._rows.n)
        return func(*args, **(kwargs or {}))


class Segments(StepCalls):
    """Cuts what runs under it at the calls that depend on the step.

    Subclasses say what a segment is, in `begin` and `end`.
    """

    def __init__(self, rows: Rows) -> None:
        super().__init__(rows)
        self.parts: list[Replay] = []
        self._updated = False

    def begin(self) -> None:
        """What follows belongs to a new segment."""
        raise NotImplementedError

    def end(self) -> None:
        """The segment is over: its work has been done and is among `parts`."""
        raise NotImplementedError

    def hold(self, value: Tensor) -> Tensor:
        """An argument of a call, as it is kept for replays."""
        return value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        is_update = name in CACHE_UPDATES
        if not is_update and name not in ATTENTIONS:
            if self._updated:
                raise RecordingError(f"{name} ran between an update of the attention's cache and the attention")
            return func(*args, **(kwargs or {}))
        if not self._updated:
            self.end()
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.parts.append(StepCall(func, tree_map_only(Tensor, self.hold, (args, kwargs or {})), self._rows.padded))
        self._updated = is_update
        if not is_update:
            self.begin()
        return result

    def replay(self, n_rows: int) -> None:
        """Do it all again."""
        for part in self.parts:
            part(n_rows)


class _GraphSegments(Segments):
    """Segments are CUDA graphs; each is replayed as soon as it is captured, since capturing runs nothing."""

    def __init__(self, rows: Rows, stream: torch.cuda.Stream, pool: Any) -> None:
        super().__init__(rows)
        self._side = stream
        self._main = torch.cuda.current_stream()
        self._pool = pool
        self._graph: torch.cuda.CUDAGraph | None = None

    def begin(self) -> None:
        self._side.wait_stream(self._main)
        torch.cuda.set_stream(self._side)
        self._graph = torch.cuda.CUDAGraph()
        # Other threads (a copy to the host, another engine) may go on meanwhile.
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> None:
        graph, self._graph = self._graph, None
        assert graph is not None
        try:
            graph.capture_end()
        finally:
            torch.cuda.set_stream(self._main)
        self._main.wait_stream(self._side)
        graph.replay()
        self.parts.append(lambda n_rows: graph.replay())

    def give_up(self) -> None:
        """Leave a capture that failed."""
        if self._graph is not None:
            # The failure itself may have ended the capture.
            with contextlib.suppress(RuntimeError):
                self._graph.capture_end()
            self._graph = None
        torch.cuda.set_stream(self._main)

    def hold(self, value: Tensor) -> Tensor:
        # The graphs' pool keeps the memory; holding it here would keep other graphs from using it in their turn.
        from vllm.utils.torch_utils import weak_ref_tensor

        held: Tensor = weak_ref_tensor(value)
        return held


class CudaRecorder:
    """Recordings of one device. They share memory for what is not handed from one to the next, so of two of them one
    must have ended before the other begins.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def prepare(self, run: Callable[[], Any], rows: Rows) -> Any:
        """See Recorder."""
        main = torch.cuda.current_stream()
        self._stream.wait_stream(main)
        with torch.cuda.stream(self._stream), StepCalls(rows):
            value = run()
        main.wait_stream(self._stream)
        return value

    def record(self, run: Callable[[], Any], rows: Rows) -> tuple[Replay, Any]:
        """See Recorder."""
        torch.cuda.synchronize()
        segments = _GraphSegments(rows, self._stream, self._pool)
        collects = gc.isenabled()
        # What the collector would free may belong to another stream or graph.
        gc.disable()
        try:
            segments.begin()
            with segments:
                value = run()
            segments.end()
        except BaseException as error:
            segments.give_up()
            if isinstance(error, RecordingError) or not isinstance(error, Exception):
                raise
            raise RecordingError(f"{type(error).__name__}: {error}") from error
        finally:
            if collects:
                gc.enable()
        return segments.replay, value
