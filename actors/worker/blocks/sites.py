"""Sites: where the forward pass looks whether a block waits there.

Every module's ``forward`` is wrapped once. Without blocks in the batch a wrapped module costs one attribute test.
Sides are "input" (before the module runs, arguments) and "output" (after it, its return value).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from actors.worker.blocks.runtime import BlockRuntime
    from actors.worker.blocks.task import BlockTask
    from actors.worker.blocks.tp_layout import SiteLayout


class Site:
    """One side of one module, operation, or engine value.

    `seen_step` is the number of the engine step that last went past it.
    """

    __slots__ = ("layout", "name", "per_request", "seen_step", "shared_paths", "waiting")

    def __init__(self, name: str, *, per_request: bool = False) -> None:
        self.name = name
        self.waiting: list[BlockTask] = []
        self.seen_step = -1
        self.per_request = per_request
        """Rows are one per request, not one per token (logits, samples)."""
        self.shared_paths: tuple[str, ...] = ()
        """All paths of a module that several layers share; such a module has no value of its own."""
        self.layout: SiteLayout | None = None


class ModuleSites:
    """Both sides of one module and its original forward."""

    __slots__ = ("forward", "input", "module", "output", "path", "source")

    def __init__(self, path: str, module: nn.Module) -> None:
        self.path = path
        self.module = module
        self.input = Site(f"{path}.input" if path else "input")
        self.output = Site(f"{path}.output" if path else "output")
        self.forward: Callable[..., Any] = module.forward
        self.source: Any = None


def install_sites(model: nn.Module, runtime: BlockRuntime) -> dict[str, ModuleSites]:
    """Wrap the forward of every module of `model`; returns the sites by path, shared modules under each path."""
    by_module: dict[int, ModuleSites] = {}
    by_path: dict[str, ModuleSites] = {}
    paths: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        sites = by_module.get(id(module))
        if sites is None:
            sites = by_module[id(module)] = ModuleSites(path, module)
            _wrap(sites, runtime)
        by_path[path] = sites
        paths.setdefault(id(module), []).append(path)
    for key, names in paths.items():
        if len(names) > 1 and len({_layer_of(name) for name in names}) > 1:
            by_module[key].input.shared_paths = by_module[key].output.shared_paths = tuple(names)
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
        if not runtime.active:
            return sites.forward(*args, **kwargs)
        site_in.seen_step = runtime.step_number
        if site_in.waiting:
            args, kwargs = runtime.serve(site_in, (args, kwargs))
        out = sites.forward(*args, **kwargs)
        site_out.seen_step = runtime.step_number
        if site_out.waiting:
            out = runtime.serve(site_out, out)
        return out

    sites.module.forward = forward
