"""Sites: where the forward pass looks whether a block waits there.

Every module's ``forward`` is wrapped once. Without blocks in the batch a wrapped module costs one attribute test.
Sides are "input" (before the module runs, arguments) and "output" (after it, its return value).

A module that several layers share (rotary embeddings, some activation functions) has sites under each of its paths: the
module that calls it tells which of them is meant.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from actors.worker.blocks.layer_graphs import LayerGraph
    from actors.worker.blocks.recording import Recorder
    from actors.worker.blocks.runtime import BlockRuntime
    from actors.worker.blocks.task import BlockTask
    from actors.worker.blocks.tp_layout import SiteLayout


class Site:
    """One side of one module, operation, or engine value.

    `seen_step` is the number of the engine step that last went past it.
    """

    __slots__ = ("layout", "name", "per_request", "recorders", "seen_step", "waiting")

    def __init__(self, name: str, *, per_request: bool = False) -> None:
        self.name = name
        self.waiting: list[BlockTask] = []
        self.recorders: list[Recorder] = []
        self.seen_step = -1
        self.per_request = per_request
        """Rows are one per request, not one per token (logits, samples)."""
        self.layout: SiteLayout | None = None


class ModuleSites:
    """Both sides of one module at one path, and its original forward."""

    __slots__ = ("forward", "graph", "input", "module", "output", "path", "source")

    def __init__(self, path: str, module: nn.Module) -> None:
        self.path = path
        self.module = module
        self.input = Site(f"{path}.input" if path else "input")
        self.output = Site(f"{path}.output" if path else "output")
        self.forward: Callable[..., Any] = module.forward
        self.source: Any = None
        self.graph: LayerGraph | None = None
        """What runs in the forward's place where the module is a layer."""


def install_sites(model: nn.Module, runtime: BlockRuntime) -> dict[str, ModuleSites]:
    """Wrap the forward of every module of `model`; returns the sites by path."""
    paths: dict[int, list[str]] = {}
    modules: dict[int, nn.Module] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(id(module), []).append(path)
        modules[id(module)] = module
    by_path: dict[str, ModuleSites] = {}
    callers: set[str] = set()
    shared_paths: set[str] = set()
    for key, names in paths.items():
        module = modules[key]
        if len({_layer_of(name) for name in names}) > 1:
            shared = {name.rpartition(".")[0]: ModuleSites(name, module) for name in names}
            by_path |= {sites.path: sites for sites in shared.values()}
            callers |= set(shared)
            shared_paths |= set(names)
            _wrap_shared(module, shared, runtime)
        else:
            # One layer, or none: several names of one place (tied embeddings).
            sites = ModuleSites(names[0], module)
            by_path |= dict.fromkeys(names, sites)
            _wrap(sites, runtime)
    for path in callers - shared_paths:
        _note_caller(by_path[path], runtime)
    for path, sites in by_path.items():
        if path and _layer_of(path) == path == sites.path:
            inner = [each for name, each in by_path.items() if name.startswith(f"{path}.")]
            around = [each.module for name, each in by_path.items() if path.startswith(f"{name}." if name else "")]
            sites.graph = runtime.graphs.add_layer(sites, inner, around)
    return by_path


def _layer_of(path: str) -> str:
    """The path up to and with its first number: two layers' paths differ there."""
    parts = path.split(".")
    for index, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: index + 1])
    return ""


def _wrap(sites: ModuleSites, runtime: BlockRuntime) -> None:
    site_in, site_out = sites.input, sites.output

    def forward(*args: Any, **kwargs: Any) -> Any:
        graph = sites.graph
        if not runtime.active:
            return sites.forward(*args, **kwargs) if graph is None else graph(runtime, args, kwargs)
        site_in.seen_step = runtime.step_number
        if site_in.waiting:
            args, kwargs = runtime.serve(site_in, (args, kwargs))
        if site_in.recorders:
            runtime.record(site_in, (args, kwargs))
        out = sites.forward(*args, **kwargs) if graph is None else graph(runtime, args, kwargs)
        site_out.seen_step = runtime.step_number
        if site_out.waiting:
            out = runtime.serve(site_out, out)
        if site_out.recorders:
            runtime.record(site_out, out)
        return out

    sites.module.forward = forward


def _wrap_shared(module: nn.Module, by_caller: dict[str, ModuleSites], runtime: BlockRuntime) -> None:
    original: Callable[..., Any] = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        sites = by_caller.get(runtime.caller) if runtime.active else None
        if sites is None:
            return original(*args, **kwargs)
        sites.input.seen_step = runtime.step_number
        if sites.input.waiting:
            args, kwargs = runtime.serve(sites.input, (args, kwargs))
        if sites.input.recorders:
            runtime.record(sites.input, (args, kwargs))
        # What a shared module calls is shared as well.
        before, runtime.caller = runtime.caller, sites.path
        try:
            out = sites.forward(*args, **kwargs)
        finally:
            runtime.caller = before
        sites.output.seen_step = runtime.step_number
        if sites.output.waiting:
            out = runtime.serve(sites.output, out)
        if sites.output.recorders:
            runtime.record(sites.output, out)
        return out

    module.forward = forward


def _note_caller(sites: ModuleSites, runtime: BlockRuntime) -> None:
    """Let `runtime.caller` name this module while it runs."""
    wrapped: Callable[..., Any] = sites.module.forward
    path = sites.path

    def forward(*args: Any, **kwargs: Any) -> Any:
        before, runtime.caller = runtime.caller, path
        try:
            return wrapped(*args, **kwargs)
        finally:
            runtime.caller = before

    sites.module.forward = forward
