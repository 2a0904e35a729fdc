"""Walking through the values of a call: from a module's side and elements to the tensor that is there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from actors.location_errors import UnknownLocation, UnreadableLocation
from actors.worker.locations.values import Call, ModelValues, TensorValue, Value
from actors.worker.locations.view import ModelView


def only_call(view: ModelView, values: ModelValues, path: str, named: str) -> Call:
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


def source_of(
    view: ModelView, values: ModelValues, path: str, side: str, element: tuple[int | str, ...], named: str
) -> tuple[Value, tuple[int | str, ...]]:
    """The value that elements index, and the elements in full form."""
    call = only_call(view, values, path, named)
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


def tensor_at(
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
        inside = tensor_elements(value)
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


def tensor_elements(value: Value, prefix: str = "") -> list[str]:
    if isinstance(value, TensorValue):
        return [prefix] if value.token_axis is not None and value.dtype.is_floating_point else []
    if isinstance(value, tuple):
        return [text for i, part in enumerate(value) for text in tensor_elements(part, f"{prefix}[{i}]")]
    if isinstance(value, dict):
        return [text for key, part in value.items() for text in tensor_elements(part, f"{prefix}[{key}]")]
    return []


def _describe(value: Value) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(_describe(part) for part in value)})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_describe(part)}" for key, part in value.items()) + "}"
    if isinstance(value, type):
        return "None" if value is type(None) else value.__name__
    return str(value)
