"""Locations of aliases: the family's table for most, the data flow for the residual stream."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from actors.location_errors import LocationError, UnknownLocation, UnreadableLocation
from actors.worker.locations import families, syntax
from actors.worker.locations.location import Location
from actors.worker.locations.paths import locate
from actors.worker.locations.stream import FIRST_OF_PAIR, Stream, stream_after
from actors.worker.locations.syntax import AliasName, PathName
from actors.worker.locations.values import TensorValue, Value
from actors.worker.locations.view import ModelView
from actors.worker.locations.walk import only_call


def alias_locations(view: ModelView, name: str, asked: AliasName) -> list[Location]:
    alias = families.SYNONYMS.get(asked.alias, asked.alias)
    if alias in families.ONCE:
        if asked.layers is not None:
            raise UnknownLocation(f"{name!r}: {alias} exists once in a model; write {alias!r}")
        return [_once(view, alias)]
    if alias not in families.PER_LAYER:
        close = difflib.get_close_matches(asked.alias, (*families.ALIASES, *families.SYNONYMS), n=3)
        meant = f"close matches: {', '.join(close)}" if close else f"aliases are {', '.join(families.ALIASES)}"
        raise UnknownLocation(f"{name!r} is neither an alias nor a module path with a side; {meant}")
    if asked.layers is None:
        raise UnknownLocation(
            f"{name!r}: name the layer, {alias}.{max(view.n_layers - 1, 0)}, or all of them, {alias}.*"
        )
    layers = syntax.numbers(name, asked.layers, view.n_layers)
    if asked.layers != "*":
        return [_in_layer(view, alias, layer) for layer in layers]
    found: list[Location] = []
    refusal: LocationError | None = None
    for layer in layers:
        try:
            found.append(_in_layer(view, alias, layer))
        except LocationError as error:  # a model may mix kinds of layers: * means those that have it
            refusal = error
    if not found and refusal is not None:
        raise refusal
    return found


def _once(view: ModelView, alias: str) -> Location:
    return _first_of(view, alias, alias, "", view.family.once.get(alias, ()))


def _in_layer(view: ModelView, alias: str, layer: int) -> Location:
    name = f"{alias}.{layer}"
    if alias not in families.STREAMS:
        return _first_of(view, alias, name, f"{view.family.layers}.{layer}.", view.family.layer.get(alias, ()))
    if alias == "residual_pre" and layer == 0:
        path = f"{view.layers}.0"
        call = only_call(view, view.values, path, name)
        for element in ((0, i) for i in range(len(call.args))):
            if _is_stream(call.args[element[1]]):
                return locate(view, path, "inputs", element, alias=(alias, name))
        for key, value in call.kwargs.items():
            if _is_stream(value):
                return locate(view, path, "inputs", (1, key), alias=(alias, name))
        raise UnreadableLocation(f"{name}: {path} receives no rows")
    source = layer if alias == "residual" else layer - 1
    stream = _stream(view, source, name)
    return locate(view, f"{view.layers}.{source}", "output", stream.element, addend=stream.addend, alias=(alias, name))


def _is_stream(value: Value) -> bool:
    return isinstance(value, TensorValue) and value.token_axis is not None and value.dtype.is_floating_point


def _stream(view: ModelView, layer: int, name: str) -> Stream:
    only_call(view, view.values, f"{view.layers}.{layer}", name)
    if view.architecture in families.STREAM_IS_FIRST:
        return FIRST_OF_PAIR
    norms = view.family.once.get("final_norm", ())
    final_norm = None
    if norms:
        parsed = syntax.parse(norms[0])
        assert isinstance(parsed, PathName)
        final_norm = view.prefix + parsed.module
    return stream_after(view.model, view.values, view.layers, layer, final_norm)


def _first_of(view: ModelView, alias: str, name: str, inside: str, candidates: Sequence[str]) -> Location:
    """The first candidate that the model has; otherwise the family says why there is none."""
    reasons: list[str] = []
    for candidate in candidates:
        # The text model of a multimodal one owns its logits processor too, under the same prefix.
        parsed = syntax.parse(view.prefix + inside + candidate)
        assert isinstance(parsed, PathName)
        try:
            location = locate(view, parsed.module, parsed.side, parsed.element, alias=(alias, name))
            _refuse_loose_bias(view, location, parsed)
            return location
        except LocationError as error:
            reasons.append(str(error))
    why = view.family.missing.get(alias) or "; ".join(reasons) or "its table has no such place"
    raise UnknownLocation(f"{view.family.name} ({view.architecture}) has no {name}: {why}")


def _refuse_loose_bias(view: ModelView, location: Location, parsed: PathName) -> None:
    """A module that returns its bias beside its product has not added it yet, so the product is not its output."""
    if location.alias not in ("attn_out", "mlp_out") or parsed.element != (0,):
        return
    output = view.values.calls[location.module][0].output
    if any(isinstance(part, TensorValue) and part.token_axis is None for part in output[1:]):
        raise UnreadableLocation(f"{location.module} returns its bias beside its product, to be added later")
