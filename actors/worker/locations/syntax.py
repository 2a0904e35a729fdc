"""The names of locations, as text.

- alias: `embed`, `final_norm`, `logits`; per layer `residual.10`, `q.3`
- path and side: `model.layers.10.mlp.output`, then elements of a tuple or of the keyword arguments:
  `model.layers.3.output[0]`, `model.layers.3.self_attn.attn.inputs[0][2]`, `….inputs[1][hidden_states]`
- pattern: `*` for all layers or for any one part of a path: `residual.*`, `model.layers.*.mlp.output`
- range: Python's slice in place of a number, the end not included: `residual.0:12`, `residual.0:12:2`,
  `model.layers.4:8.mlp.output`
"""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass

from actors.location_errors import UnknownLocation

SIDES = ("output", "inputs", "input")
_PATH = re.compile(r"(?P<module>.+)\.(?P<side>output|inputs|input)(?P<elements>(\[[^\[\]]*\])*)")
_ELEMENT = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d*):(\d*)(?::(\d*))?")


@dataclass(frozen=True, kw_only=True, slots=True)
class PathName:
    """A module path with a side, as it was asked for; the path may hold patterns and ranges."""

    module: str
    side: str
    element: tuple[int | str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class AliasName:
    """An alias and the layers it was asked for: a number, `*`, a range, or nothing."""

    alias: str
    layers: str | None


def parse(name: str) -> PathName | AliasName:
    """Take a location's name apart.

    Raises:
        UnknownLocation: it is neither an alias nor a path with a side.
    """
    matched = _PATH.fullmatch(name)
    if matched is not None:
        elements = tuple(_element(name, text) for text in _ELEMENT.findall(matched["elements"]))
        return PathName(module=matched["module"], side=matched["side"], element=elements)
    alias, _, layers = name.partition(".")
    if alias.isidentifier() and (not layers or is_numbers(layers)):
        return AliasName(alias=alias, layers=layers or None)
    raise UnknownLocation(
        f"{name!r} is no location: write an alias (residual.10) or a module path with a side "
        f"({name.rstrip('.')}.output); sides are .output, .input and .inputs"
    )


def _element(name: str, text: str) -> int | str:
    bare = text.strip().strip("'\"")
    if re.fullmatch(r"-?\d+", bare):
        return int(bare)
    if bare.isidentifier():
        return bare
    raise UnknownLocation(
        f"{name!r}: [{text}] is neither a number nor the name of an argument; slices are not taken here"
    )


def is_numbers(text: str) -> bool:
    """Whether a part of a name stands for layer numbers: `3`, `*`, `0:12:2`."""
    return text == "*" or text.isdigit() or _RANGE.fullmatch(text) is not None


def numbers(name: str, text: str, count: int) -> list[int]:
    """The layer numbers that `3`, `*` or `0:12:2` stands for in a model of `count` layers.

    Raises:
        UnknownLocation: a layer that the model does not have, or no layer at all.
    """
    if text == "*":
        return list(range(count))
    if text.isdigit():
        chosen = [int(text)]
    else:
        matched = _RANGE.fullmatch(text)
        if matched is None:
            raise UnknownLocation(f"{name!r}: {text!r} is neither a layer number, nor *, nor a range such as 0:12:2")
        start, stop, step = (int(bound) if bound else None for bound in matched.groups())
        chosen = list(range(start or 0, count if stop is None else stop, 1 if step is None else max(step, 1)))
    if not chosen:
        raise UnknownLocation(f"{name!r} names no layer: the end of a range is not included")
    if max(chosen) >= count:
        raise UnknownLocation(f"{name!r}: the model has {count} layers, 0 to {count - 1}")
    return chosen


def part_matches(pattern: str, part: str) -> bool:
    """Whether one part of a module path fits a pattern's part: a name, `*`, `norm*`, or a range of numbers."""
    if _RANGE.fullmatch(pattern):
        start, stop, step = (int(bound) if bound else None for bound in pattern_bounds(pattern))
        if not part.isdigit():
            return False
        number, first = int(part), start or 0
        return number >= first and (stop is None or number < stop) and (number - first) % max(step or 1, 1) == 0
    return fnmatch.fnmatchcase(part, pattern)


def pattern_bounds(pattern: str) -> tuple[str | None, ...]:
    """The three bounds of a range as text."""
    matched = _RANGE.fullmatch(pattern)
    assert matched is not None
    return matched.groups()


def has_pattern(path: str) -> bool:
    """Whether a path stands for several modules."""
    return any("*" in part or "?" in part or _RANGE.fullmatch(part) for part in path.split("."))


def format_path(module: str, side: str, element: tuple[int | str, ...]) -> str:
    """The name of a plain path in canonical form."""
    return f"{module}.{side}" + "".join(f"[{key}]" for key in element)
