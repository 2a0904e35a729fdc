"""Layers without their Python code: a layer in which no block waits is launched from a recording.

Blocks make the engine eager, and an eager step of a few rows costs the host many times what it costs the device. But a
block runs only when the location that it waits for is reached. So when a layer is entered and nobody waits, records or
has a PyTorch hook inside of it, nobody will before it ends: its modules need not run one by one.

Invariants:
- the recorded work is the same kernels on the same values, with rows padded up to a power of two;
- a location inside counts as passed all the same, so a block that reads it too late is told;
- whatever a recording cannot repeat runs as before: other arguments, many rows, a layer that is not plain attention
  and dense arithmetic, one whose recording failed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from actors.worker.blocks.graph_recording import Recorder, RecordingError, Replay, Rows

if TYPE_CHECKING:
    from actors.worker.blocks.runtime import BlockRuntime
    from actors.worker.blocks.sites import ModuleSites, Site

# Above, the device has enough to do to hide the host's work.
MAX_ROWS = 256

logger = logging.getLogger(__name__)


class LayerGraphs:
    """The recordings of one model.

    Args:
        recorder: makes them; None: every layer always runs as it is.
        contextual: modules that read vLLM's forward context when they are called.
    """

    def __init__(self, recorder: Recorder | None, contextual: Iterable[nn.Module] = ()) -> None:
        self.recorder = recorder
        self.contextual = frozenset(id(module) for module in contextual)
        self.n_rows = 0
        """Rows of the running pass, 0 where layers cannot be recorded."""
        self.bucket = 0
        """The same, padded."""
        self.n_replays = 0
        """Layers launched from recordings so far."""
        # Full-size outputs by bucket and address: the next layer reads them where they are.
        self.outputs: dict[tuple[int, int], Tensor] = {}
        # Where layers read index arguments (positions), by bucket, place and dtype: those of a pass all get the same.
        self.indices: dict[tuple[int, int, torch.dtype], Tensor] = {}
        self._copied: dict[int, Tensor] = {}
        self._layers: dict[str, LayerGraph] = {}

    def begin(self, n_rows: int) -> None:
        """A forward pass of `n_rows` rows of requests begins."""
        self._copied.clear()
        if self.recorder is None or not 0 < n_rows <= MAX_ROWS:
            self.n_rows = 0
            return
        self.n_rows = n_rows
        self.bucket = 1 << (n_rows - 1).bit_length()

    def end(self) -> None:
        """What follows is not the pass's own."""
        self.n_rows = 0

    def forget_copies(self) -> None:
        """A block has written into the pass's values."""
        self._copied.clear()

    def copy_in(self, static: Tensor, value: Tensor) -> None:
        """Bring an argument to where the recording reads it."""
        address = static.data_ptr()
        if value.data_ptr() == address:
            return
        if not value.dtype.is_floating_point:
            # No layer writes into its indices.
            if self._copied.get(address) is value:
                return
            self._copied[address] = value
        static[: self.n_rows].copy_(value)

    def add_layer(self, sites: ModuleSites, inner: Sequence[ModuleSites], around: Sequence[nn.Module]) -> LayerGraph:
        """Record the layer at `sites`, whose inner modules are at `inner`, and which is inside the modules `around`."""
        layer = self._layers[sites.path] = LayerGraph(self, sites, inner)
        if self.recorder is not None:
            layer.refusal = _why_not(sites.module, around, self.contextual)
        return layer

    def close(self) -> None:
        """Give up all recordings and their memory."""
        self.recorder = None
        self.n_rows = 0
        for layer in self._layers.values():
            layer.forget()
        self.indices.clear()

    def changed(self, path: str) -> None:
        """The code of the module at `path` is another one now."""
        for layer in self._layers.values():
            if path == layer.path or path.startswith(f"{layer.path}."):
                layer.forget()

    @property
    def refusals(self) -> dict[str, str]:
        """Layers that always run as they are, and why."""
        return {path: layer.refusal for path, layer in self._layers.items() if layer.refusal}


@dataclass(kw_only=True, slots=True)
class _Recording:
    """A layer at one number of rows. It runs at that size once before it is recorded; until then, `replay` is None."""

    names: tuple[str, ...] = ()
    """Of the last inputs, which are given by name."""
    inputs: list[Any] = field(default_factory=list)
    """Static tensors, and constants."""
    replay: Replay | None = None
    output: Any = None
    passed: list[Site] = field(default_factory=list)
    shown: Any = None
    """The first `n_shown` rows of the output."""
    n_shown: int = -1


class LayerGraph:
    """One layer; call it in place of its forward."""

    def __init__(self, graphs: LayerGraphs, sites: ModuleSites, inner: Sequence[ModuleSites]) -> None:
        self.path = sites.path
        self.refusal = ""
        """Why it always runs as it is; empty: it does not."""
        self._graphs = graphs
        self._sites = sites
        self._inner = inner
        self._watched: list[Site] = []
        # Somebody's own hooks run with their modules.
        modules = [each.module for each in inner]
        self._hooks = [hooks for each in modules for hooks in (each._forward_hooks, each._forward_pre_hooks)]
        self._recordings: dict[int, _Recording] = {}
        self.forget()

    def forget(self) -> None:
        """Drop what is recorded."""
        for bucket, recording in self._recordings.items():
            if recording.replay is not None:
                for tensor in _tensors(recording.output):
                    self._graphs.outputs.pop((bucket, tensor.data_ptr()), None)
        self._recordings.clear()
        self._watched = [site for module in self._inner for site in (module.input, module.output)]
        for module in (self._sites, *self._inner):
            if module.source is not None:
                self._watched += module.source.sites

    def __call__(self, runtime: BlockRuntime, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The layer's output."""
        graphs = self._graphs
        if not graphs.n_rows or self.refusal or self._is_watched():
            return self._sites.forward(*args, **kwargs)
        try:
            recording = self._recordings.get(graphs.bucket)
            if recording is None:
                recording = self._recordings[graphs.bucket] = _Recording()
            if recording.replay is None:
                recording.names = tuple(kwargs)
                recording.inputs = [self._static(place, value) for place, value in enumerate((*args, *kwargs.values()))]
                # A recording that fails may have written into what it was given.
                args, kwargs = tree_map_only(Tensor, torch.clone, (args, kwargs))
            elif not _fits(recording, args, kwargs, graphs.n_rows):
                return self._sites.forward(*args, **kwargs)
            for static, value in zip(recording.inputs, (*args, *kwargs.values()), strict=True):
                if isinstance(static, Tensor):
                    graphs.copy_in(static, value)
            if recording.replay is None:
                self._record(recording, len(args), runtime)
            else:
                recording.replay(graphs.n_rows)
                graphs.n_replays += 1
                step_number = runtime.step_number
                for site in recording.passed:
                    site.seen_step = step_number
        except RecordingError as error:
            # Attention may have run already: it writes the same keys and values when it runs again.
            self.refusal = str(error)
            self.forget()
            logger.info("%s runs module by module: %s", self.path, self.refusal)
            return self._sites.forward(*args, **kwargs)
        if recording.n_shown != graphs.n_rows:
            recording.shown, recording.n_shown = _first_rows(recording.output, graphs.n_rows), graphs.n_rows
        return recording.shown

    def _is_watched(self) -> bool:
        return any(self._hooks) or any(site.waiting or site.recorders for site in self._watched)

    def _static(self, place: int, value: Any) -> Any:
        graphs = self._graphs
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if not isinstance(value, Tensor) or value.shape[:1] != (graphs.n_rows,) or not value.is_contiguous():
            raise RecordingError(f"it takes {_describe(value)} in a pass of {graphs.n_rows} rows")
        shape = (graphs.bucket, *value.shape[1:])
        if value.dtype.is_floating_point:
            before = graphs.outputs.get((graphs.bucket, value.data_ptr()))
            if before is not None and (before.shape, before.dtype) == (shape, value.dtype):
                return before
            return value.new_zeros(shape)
        if value.dim() > 1:
            # Positions of several axes have their rows last.
            raise RecordingError(f"it takes {_describe(value)}")
        key = (graphs.bucket, place, value.dtype)
        if key not in graphs.indices:
            graphs.indices[key] = value.new_zeros(shape)
        return graphs.indices[key]

    def _record(self, recording: _Recording, n_positional: int, runtime: BlockRuntime) -> None:
        recorder = self._graphs.recorder
        assert recorder is not None
        rows = Rows(n=self._graphs.n_rows, padded=self._graphs.bucket)
        values = recording.inputs

        def run() -> Any:
            return self._sites.forward(
                *values[:n_positional], **dict(zip(recording.names, values[n_positional:], strict=True))
            )

        recording.n_shown = -1
        if recording.output is None:
            recording.output = recorder.prepare(run, rows)
            return
        # The modules inside say what they pass, though no block of this pass may care.
        before, runtime.active = runtime.active, True
        try:
            replay, recording.output = recorder.record(run, rows)
        finally:
            runtime.active = before
        recording.passed = [site for site in self._watched if site.seen_step == runtime.step_number]
        outputs = list(_tensors(recording.output))
        for tensor in outputs:
            if tensor.shape[:1] != (self._graphs.bucket,):
                raise RecordingError(f"it returns {_describe(tensor)} in a pass of {self._graphs.bucket} rows")
        recording.replay = replay
        self._graphs.outputs |= {(self._graphs.bucket, tensor.data_ptr()): tensor for tensor in outputs}


def _why_not(layer: nn.Module, around: Sequence[nn.Module], contextual: frozenset[int]) -> str:
    """Why a layer is not recorded, empty when it can be: it has to be one attention between dense arithmetic."""
    # vLLM's own mark on what it compiles and captures: its Python code depends on shapes alone.
    if not any(hasattr(module, "do_not_compile") for module in (layer, *around)):
        return "vLLM does not compile this model"
    found = [module for module in layer.modules() if id(module) in contextual]
    # Attention is cut out of the recording where it is called as an operation; nothing else is.
    if len(found) != 1 or getattr(found[0], "use_direct_call", True):
        return f"it has {', '.join(type(module).__name__ for module in found) or 'no attention'}"
    return ""


def _fits(recording: _Recording, args: tuple[Any, ...], kwargs: dict[str, Any], n_rows: int) -> bool:
    values = (*args, *kwargs.values())
    if len(values) != len(recording.inputs) or tuple(kwargs) != recording.names:
        return False
    for static, value in zip(recording.inputs, values, strict=True):
        if isinstance(static, Tensor):
            if (
                not isinstance(value, Tensor)
                or value.dtype != static.dtype
                or value.shape[0] != n_rows
                or value.shape[1:] != static.shape[1:]
            ):
                return False
        elif static is not value and (type(static) is not type(value) or static != value):
            return False
    return True


def _first_rows(value: Any, n_rows: int) -> Any:
    if isinstance(value, Tensor):
        return value[:n_rows]
    if isinstance(value, (tuple, list)):
        return type(value)([_first_rows(item, n_rows) for item in value])
    return value


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        for item in value:
            yield from _tensors(item)
    elif value is not None:
        raise RecordingError(f"it returns {_describe(value)}")


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return f"a {type(value).__name__}"
