"""From the names of locations to Locations.

`resolve_locations` is all that most callers need; names that stand for several locations are spelled out in model
order, and a location that two names share by name is resolved once.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import LinearBase, RowParallelLinear

from actors.location_errors import LocationError, UnknownLocation, UnreadableLocation
from actors.worker.locations import families, syntax
from actors.worker.locations.layout import REPLICATED, Layout, Part
from actors.worker.locations.location import Location, array_name
from actors.worker.locations.stream import FIRST_OF_PAIR, Stream, stream_after
from actors.worker.locations.syntax import AliasName, PathName, format_path
from actors.worker.locations.values import Call, ModelValues, TensorValue, Value
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
        found = _alias_locations(view, name, parsed) if isinstance(parsed, AliasName) else _paths(view, name, parsed)
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


# -- paths ---------------------------------------------------------------------------------------------------------


def _paths(view: ModelView, name: str, asked: PathName) -> list[Location]:
    if not syntax.has_pattern(asked.module):
        return [_locate(view, asked.module, asked.side, asked.element)]
    pattern = asked.module.split(".")
    fitting = [
        path
        for path in view.paths.values()
        if path.count(".") == len(pattern) - 1
        and all(itertools.starmap(syntax.part_matches, zip(pattern, path.split("."), strict=True)))
    ]
    if not fitting:
        raise UnknownLocation(f"{name!r} fits no module of {view.architecture}; {_hint(view, asked.module)}")
    return [_locate(view, path, asked.side, asked.element) for path in fitting]


def _locate(
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
    source, full_element = _source(view, view.values, path, side, element, named)
    value = _tensor(view, source, full_element, path, side, named)
    layout = _layout(view, path, side, full_element, value, named)
    record = named
    full_addend = None
    if addend is not None:
        other_name = format_path(path, side, addend)
        _, full_addend = _source(view, view.values, path, side, addend, other_name)
        other = _tensor(view, source, full_addend, path, side, other_name)
        if other.shape != value.shape or _layout(view, path, side, full_addend, other, other_name) != layout:
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


def _calls(view: ModelView, values: ModelValues, path: str, named: str) -> Call:
    calls = values.calls.get(path, ())
    if len(calls) == 1:
        return calls[0]
    if len(calls) > 1:
        raise UnreadableLocation(
            f"{named}: the module is called {len(calls)} times in one pass because several layers share it; read it "
            "through a module that only one layer has, such as the attention kernel's inputs"
        )
    if values.failure is not None:
        raise UnreadableLocation(
            f"{named}: its width is unknown, because the weightless pass ended before it ({values.failure})"
        )
    raise UnreadableLocation(
        f"{named}: the module's forward is not called in a pass (its weights are used by another module, or a fused "
        "kernel does its work)"
    )


def _source(
    view: ModelView, values: ModelValues, path: str, side: str, element: tuple[int | str, ...], named: str
) -> tuple[Value, tuple[int | str, ...]]:
    """The value that elements index, and the elements in full form."""
    call = _calls(view, values, path, named)
    if side == "output":
        source: Value = call.output
    else:
        source = (call.args, call.kwargs)
        if side == "input":
            if not call.args and not call.kwargs:
                raise UnreadableLocation(f"{named}: the module is called without arguments")
            first: tuple[int | str, ...] = (0, 0) if call.args else (1, next(iter(call.kwargs)))
            element = (*first, *element)
    return source, tuple(_positive(source, element))


def _positive(source: Value, element: Sequence[int | str]) -> Iterator[int | str]:
    """Elements with negative numbers counted from the start."""
    value: Any = source
    for key in element:
        if isinstance(value, tuple) and isinstance(key, int) and -len(value) <= key < 0:
            key += len(value)
        yield key
        try:
            value = value[key]
        except (LookupError, TypeError):
            value = None


def _tensor(
    view: ModelView, source: Value, element: tuple[int | str, ...], path: str, side: str, named: str
) -> TensorValue:
    value: Any = source
    for key in element:
        if not isinstance(value, tuple | dict):
            raise UnknownLocation(f"{named}: {_describe(value)} has no element [{key}]")
        container: Any = value
        try:
            value = container[key]
        except (LookupError, TypeError):
            raise UnknownLocation(f"{named}: no element [{key}] in {_describe(value)}") from None
    if isinstance(value, tuple | dict):
        inside = _tensor_elements(value)
        asked = [f"{named}{element_text}" for element_text in inside]
        hint = f"ask for {' or '.join(asked)}" if asked else "there is no tensor inside"
        aliases = f"; the residual stream is residual.{path.rpartition('.')[2]}" if _is_layer(view, path, side) else ""
        raise UnreadableLocation(f"{named} is {_describe(value)}; {hint}{aliases}")
    if not isinstance(value, TensorValue):
        raise UnreadableLocation(f"{named} is not a tensor but {_describe(value)}")
    if value.token_axis is None:
        raise UnreadableLocation(f"{named} is {value}, which has no axis that counts tokens")
    if not value.dtype.is_floating_point:
        raise UnreadableLocation(f"{named} is {value}: rows of integers are not activations")
    return value


def _is_layer(view: ModelView, path: str, side: str) -> bool:
    return side == "output" and path.rpartition(".")[0] == view.layers


def _tensor_elements(value: Value, prefix: str = "") -> list[str]:
    if isinstance(value, TensorValue):
        return [prefix] if value.token_axis is not None and value.dtype.is_floating_point else []
    if isinstance(value, tuple):
        return [text for i, part in enumerate(value) for text in _tensor_elements(part, f"{prefix}[{i}]")]
    if isinstance(value, dict):
        return [text for key, part in value.items() for text in _tensor_elements(part, f"{prefix}[{key}]")]
    return []


def _describe(value: Value) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(_describe(part) for part in value)})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_describe(part)}" for key, part in value.items()) + "}"
    if isinstance(value, type):
        return "None" if value is type(None) else value.__name__
    return str(value)


def _layer_of(view: ModelView, path: str) -> int | None:
    if not path.startswith(view.layers + "."):
        return None
    number = path[len(view.layers) + 1 :].partition(".")[0]
    return int(number) if number.isdigit() else None


# -- tensor-parallel layouts ---------------------------------------------------------------------------------------


def _layout(
    view: ModelView, path: str, side: str, element: tuple[int | str, ...], value: TensorValue, named: str
) -> Layout:
    if view.tp_size == 1:
        return REPLICATED
    source, _ = _source(view, view.shard_values, path, "output" if side == "output" else "inputs", element, named)
    local = _tensor(view, source, element, path, side, named)
    assert local.width is not None and value.width is not None
    if local.identity in _partial_sums(view):
        return Layout(kind="partial", label="partial sum")
    if local.width == value.width:
        return REPLICATED
    fused = _fused(view)
    if value.identity in fused:
        label, parts = fused[value.identity]
    elif any(sum(part.full for part in parts) == value.width for _, parts in _siblings(view, path)):
        raise UnreadableLocation(
            f"{named}: it has the width of a fused projection but is another tensor, so the order of its features over "
            f"{view.tp_size} ranks is not known; read the projection's own output, or use one rank"
        )
    else:
        label = "heads" if isinstance(view.model.get_submodule(path), Attention) else "columns"
        parts = (Part(local=local.width, full=value.width),)
    fits = all(part.local * view.tp_size % part.full == 0 and part.local <= part.full for part in parts)
    if not fits or sum(part.full for part in parts) != value.width or sum(part.local for part in parts) != local.width:
        raise UnreadableLocation(
            f"{named}: {local.width} features on a rank do not make up {value.width} over {view.tp_size} ranks"
        )
    return Layout(kind="sharded", parts=parts, label=label)


def _partial_sums(view: ModelView) -> set[int]:
    """Identities of tensors that still have to be summed over the ranks."""
    return {
        tensor.identity
        for path, module in view.shard.named_modules()
        if isinstance(module, RowParallelLinear) and not module.reduce_results
        for call in view.shard_values.calls.get(path, ())
        for tensor in _tensors(call.output)
    }


def _fused(view: ModelView) -> dict[int, tuple[str, tuple[Part, ...]]]:
    """Label and parts of fused projections' outputs, by identity in the TP=1 pass."""
    fused: dict[int, tuple[str, tuple[Part, ...]]] = {}
    for path, module in view.model.named_modules():
        parts = _parts(view, path, module)
        if len(parts) > 1:
            label = "qkv fused" if len(parts) == 3 else "gate_up fused"
            for call in view.values.calls.get(path, ()):
                for tensor in _tensors(call.output)[:1]:
                    fused[tensor.identity] = (label, parts)
    return fused


def _siblings(view: ModelView, path: str) -> list[tuple[str, tuple[Part, ...]]]:
    parent = view.model.get_submodule(path.rpartition(".")[0])
    prefix = path.rpartition(".")[0]
    named = ((f"{prefix}.{name}", child) for name, child in parent.named_children())
    return [("", parts) for child_path, child in named if len(parts := _parts(view, child_path, child)) > 1]


def _parts(view: ModelView, path: str, module: Any) -> tuple[Part, ...]:
    if not isinstance(module, LinearBase):
        return ()
    full = module.output_partition_sizes
    local: Any = view.shard.get_submodule(path)
    return tuple(Part(local=mine, full=whole) for mine, whole in zip(local.output_partition_sizes, full, strict=True))


def _tensors(value: Value) -> list[TensorValue]:
    if isinstance(value, TensorValue):
        return [value]
    if isinstance(value, tuple):
        return [tensor for part in value for tensor in _tensors(part)]
    if isinstance(value, dict):
        return [tensor for part in value.values() for tensor in _tensors(part)]
    return []


# -- aliases -------------------------------------------------------------------------------------------------------


def _alias_locations(view: ModelView, name: str, asked: AliasName) -> list[Location]:
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
        call = _calls(view, view.values, path, name)
        for element in ((0, i) for i in range(len(call.args))):
            if _tensor_elements((call.args,), "") and _is_stream(call.args[element[1]]):
                return _locate(view, path, "inputs", element, alias=(alias, name))
        for key, value in call.kwargs.items():
            if _is_stream(value):
                return _locate(view, path, "inputs", (1, key), alias=(alias, name))
        raise UnreadableLocation(f"{name}: {path} receives no rows")
    source = layer if alias == "residual" else layer - 1
    stream = _stream(view, source, name)
    return _locate(view, f"{view.layers}.{source}", "output", stream.element, addend=stream.addend, alias=(alias, name))


def _is_stream(value: Value) -> bool:
    return isinstance(value, TensorValue) and value.token_axis is not None and value.dtype.is_floating_point


def _stream(view: ModelView, layer: int, name: str) -> Stream:
    _calls(view, view.values, f"{view.layers}.{layer}", name)
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
            location = _locate(view, parsed.module, parsed.side, parsed.element, alias=(alias, name))
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
