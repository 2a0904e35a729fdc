"""From the names of locations to Locations.

`resolve_locations` is all that most callers need; names that stand for several locations are spelled out in model
order, and a location that two names share by name is resolved once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn
from vllm.config import VllmConfig

from actors.location_errors import LocationError
from actors.worker.locations import syntax
from actors.worker.locations.aliases import alias_locations
from actors.worker.locations.location import Location
from actors.worker.locations.paths import path_locations
from actors.worker.locations.syntax import AliasName
from actors.worker.locations.view import ModelView, view_model


def resolve_locations(
    model: nn.Module, names: Sequence[str], *, vllm_config: VllmConfig | None = None, tp_size: int | None = None
) -> tuple[Location, ...]:
    """Resolve names on a tree of `build_model_tree` or on a loaded, possibly tensor-parallel model.

    Args:
        model: the model.
        names: aliases, module paths with a side, patterns and ranges (see `syntax`).
        vllm_config: of the engine; found on the model when left out.
        tp_size: tensor-parallel ranks; the engine's own when left out.

    Raises:
        UnknownLocation: the model has no such place; the message lists close matches.
        UnreadableLocation: the place holds no rows.
    """
    return resolve_in_view(view_model(model, vllm_config, tp_size), names)


def resolve_in_view(view: ModelView, names: Sequence[str]) -> tuple[Location, ...]:
    """As `resolve_locations`, on a view that is at hand."""
    resolved: dict[str, Location] = {}
    for name in names:
        parsed = syntax.parse(name)
        found = (
            alias_locations(view, name, parsed) if isinstance(parsed, AliasName) else path_locations(view, name, parsed)
        )
        for location in found:
            resolved.setdefault(location.name, location)
    arrays = [location.array for location in resolved.values()]
    if len(set(arrays)) < len(arrays):
        doubled = sorted({array for array in arrays if arrays.count(array) > 1})
        raise LocationError(f"two locations would share the array name {doubled[0]!r}; ask for one of them")
    return tuple(resolved.values())


def last_layer_needed(locations: Iterable[Location]) -> int | None:
    """Index of the last decoder layer that must run for these locations, None when the whole model must.

    Locations before the first layer need none of the layers; 0 is returned, the least that a model can run.
    """
    last = 0
    for location in locations:
        if location.alias == "embed":
            continue
        if location.layer is None:
            return None
        last = max(last, location.layer)
    return last
