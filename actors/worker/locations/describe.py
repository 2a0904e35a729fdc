"""Every location of a model, as a table: what `harvest locations MODEL` prints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from actors.location_errors import LocationError
from actors.worker.locations import families
from actors.worker.locations.resolve import resolve_in_view
from actors.worker.locations.values import TensorValue, Value
from actors.worker.locations.view import ModelView, view_model
from actors.worker.tree import build_model_tree


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """One side of a module that can be read."""

    text: str
    """`output`, `output[0]`, `inputs[1][hidden_states]`."""
    width: int


@dataclass(frozen=True, kw_only=True, slots=True)
class DescribedModule:
    """A module of the tree with what can be read at it."""

    path: str
    class_name: str
    sides: tuple[Side, ...]
    """Empty for a module without rows; `note` then says why."""
    note: str
    aliases: tuple[str, ...]


def describe_locations(model: str, **engine_args: Any) -> list[DescribedModule]:
    """The modules of a model in order, with readable sides, full widths and aliases; no weights, no GPU.

    Args:
        model: a local folder or a Hugging Face id; only `config.json` is read.
        engine_args: vLLM's own engine arguments.
    """
    return describe_view(view_model(build_model_tree(model, **engine_args), tp_size=1))


def describe_view(view: ModelView) -> list[DescribedModule]:
    """As `describe_locations`, of a view that is at hand."""
    aliases = aliases_by_module(view)
    return [
        DescribedModule(
            path=path,
            class_name=type(module).__name__,
            sides=_sides(view, path),
            note=_note(view, path, module),
            aliases=tuple(aliases.get(path, ())),
        )
        for path, module in view.model.named_modules()
        if path
    ]


def aliases_by_module(view: ModelView) -> dict[str, list[str]]:
    """Names of aliases by the path of the module that they are read at."""
    found: dict[str, list[str]] = {}
    for alias in families.ALIASES:
        names = [alias] if alias in families.ONCE else [f"{alias}.{layer}" for layer in range(view.n_layers)]
        for name in names:
            try:
                (location,) = resolve_in_view(view, [name])
            except LocationError:
                continue
            found.setdefault(location.module, []).append(name)
    return found


def _sides(view: ModelView, path: str) -> tuple[Side, ...]:
    calls = view.values.calls.get(path, ())
    if len(calls) != 1:
        return ()
    call = calls[0]
    found = [*_leaves("output", call.output), *_leaves("inputs", (call.args, call.kwargs))]
    return tuple(Side(text=text, width=width) for text, width in found)


def _leaves(text: str, value: Value) -> list[tuple[str, int]]:
    if isinstance(value, TensorValue):
        readable = value.width is not None and value.dtype.is_floating_point
        return [(text, value.width or 0)] if readable else []
    if isinstance(value, tuple):
        return [leaf for i, part in enumerate(value) for leaf in _leaves(f"{text}[{i}]", part)]
    if isinstance(value, dict):
        return [leaf for key, part in value.items() for leaf in _leaves(f"{text}[{key}]", part)]
    return []


def _note(view: ModelView, path: str, module: nn.Module) -> str:
    calls = len(view.values.calls.get(path, ()))
    if calls > 1:
        return f"shared: called {calls} times in a pass"
    if calls == 0 and not isinstance(module, nn.ModuleList):
        return "not called in a pass"
    return ""
