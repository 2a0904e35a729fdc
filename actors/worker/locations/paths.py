"""Locations at module paths: patterns spelled out, modules found, the tensor there checked."""

from __future__ import annotations

import difflib
import itertools

from actors.location_errors import UnknownLocation, UnreadableLocation
from actors.worker.locations import syntax
from actors.worker.locations.location import Location, array_name
from actors.worker.locations.shards import layout_of
from actors.worker.locations.syntax import PathName, format_path
from actors.worker.locations.view import ModelView
from actors.worker.locations.walk import source_of, tensor_at


def path_locations(view: ModelView, name: str, asked: PathName) -> list[Location]:
    if not syntax.has_pattern(asked.module):
        return [locate(view, asked.module, asked.side, asked.element)]
    pattern = asked.module.split(".")
    fitting = [
        path
        for path in view.paths.values()
        if path.count(".") == len(pattern) - 1
        and all(itertools.starmap(syntax.part_matches, zip(pattern, path.split("."), strict=True)))
    ]
    if not fitting:
        raise UnknownLocation(f"{name!r} fits no module of {view.architecture}; {_hint(view, asked.module)}")
    return [locate(view, path, asked.side, asked.element) for path in fitting]


def locate(
    view: ModelView,
    asked_path: str,
    side: str,
    element: tuple[int | str, ...],
    *,
    addend: tuple[int | str, ...] | None = None,
    alias: tuple[str, str] | None = None,
) -> Location:
    """The location at a plain path; `alias` is (alias, canonical name)."""
    path = _canonical_path(view, asked_path)
    named = format_path(path, side, element)
    source, full_element = source_of(view, view.values, path, side, element, named)
    value = tensor_at(view, source, full_element, path, side, named)
    layout = layout_of(view, path, side, full_element, value, named)
    record = named
    full_addend = None
    if addend is not None:
        other_name = format_path(path, side, addend)
        _, full_addend = source_of(view, view.values, path, side, addend, other_name)
        other = tensor_at(view, source, full_addend, path, side, other_name)
        if other.shape != value.shape or layout_of(view, path, side, full_addend, other, other_name) != layout:
            raise UnreadableLocation(f"{named} and {other_name} differ in shape, so they do not add up to rows")
        record = f"{named} + {other_name}"
    if alias is None and path.endswith("logits_processor") and side == "output":
        alias = ("logits", named)  # its rows are the sampled ones, under whatever name
    assert value.token_axis is not None and value.width is not None
    return Location(
        name=named if alias is None else alias[1],
        array=array_name(named if alias is None else alias[1]),
        alias=None if alias is None else alias[0],
        path=record,
        layer=_layer_of(view, path),
        module=path,
        side=side,
        element=full_element,
        addend=full_addend,
        token_axis=value.token_axis,
        n_axes=len(value.shape),
        width=value.width,
        layout=layout,
    )


def _canonical_path(view: ModelView, path: str) -> str:
    """The one path of a module that may have several."""
    try:
        return view.paths[id(view.model.get_submodule(path))]
    except (AttributeError, KeyError):
        raise UnknownLocation(f"{view.architecture} has no module {path!r}; {_hint(view, path)}") from None


def _hint(view: ModelView, path: str) -> str:
    close = difflib.get_close_matches(path, view.paths.values(), n=3, cutoff=0.8)
    parts = path.split(".")
    for depth in range(len(parts) - 1, -1, -1):
        parent = ".".join(parts[:depth])
        if depth == 0 or parent in view.paths.values():
            children = [name for name, _ in view.model.get_submodule(parent).named_children()]
            shown = ", ".join(children[:12]) + (", …" if len(children) > 12 else "")
            listed = f"{parent or 'the model'} has {shown or 'no modules inside'}"
            return f"close matches: {', '.join(close)}; {listed}" if close else listed
    raise AssertionError("depth 0 always answers")


def _layer_of(view: ModelView, path: str) -> int | None:
    if not path.startswith(view.layers + "."):
        return None
    number = path[len(view.layers) + 1 :].partition(".")[0]
    return int(number) if number.isdigit() else None
