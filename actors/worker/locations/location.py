"""A resolved location, and how its rows are read from a call of its module.

Everything that needs thought is decided when a location is resolved. `read` only indexes tuples, moves an axis and
flattens, so it works inside a compiled and graph-captured forward.

Shape suffixes: T tokens of the pass, D width on this rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from actors.location_errors import UnreadableLocation
from actors.worker.locations.layout import Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class Location:
    """A place in a model whose value is one row per token.

    Values may be overwritten in place by later kernels, so what `read` returns must be consumed at once.
    """

    name: str
    """As asked for, in canonical form: `residual.10`, `model.layers.10.mlp.output`."""
    array: str
    """Safe as the name of a Zarr array: `residual.10`, `model.layers.10.output.0`."""
    alias: str | None
    """The alias without its layer number (`residual`), None for a plain path. `logits` marks sampled rows only."""
    path: str
    """The full vLLM path and side that the rows come from, for the record."""
    layer: int | None
    """Index of the decoder layer that the module belongs to."""
    module: str
    """Path of the module whose forward is wrapped."""
    side: str
    """`output`, `input` or `inputs`; both input sides are read before the forward runs."""
    element: tuple[int | str, ...]
    """Where the tensor is: in the output, or in `(args, kwargs)` on the input sides."""
    addend: tuple[int | str, ...] | None
    """A second tensor of the same value: the row is the sum of both. None for one tensor."""
    token_axis: int
    """Axis of the tensor that counts tokens."""
    n_axes: int
    width: int
    """Features of a row, full width whatever the tensor-parallel size."""
    layout: Layout
    """How a rank's rows relate to the full-width row."""

    def to_json(self) -> dict[str, Any]:
        """Plain values for a JSON file."""
        return asdict(self)


def read(
    location: Location, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any
) -> tuple[Tensor, Tensor | None]:
    """This rank's rows [T, D] of one call of `location.module`; with two tensors the row is their sum.

    Args:
        location: what to read.
        args: positional arguments of the call, without `self`.
        kwargs: keyword arguments of the call.
        output: what the forward returned; unused on the input sides.

    Returns:
        Views of the engine's memory, to be consumed before the next kernel runs.
    """
    value = output if location.side == "output" else (args, kwargs)
    x = _rows(location, _element(value, location.element))
    if location.addend is None:
        return x, None
    return x, _rows(location, _element(value, location.addend))


def _element(value: Any, element: tuple[int | str, ...]) -> Any:
    for key in element:
        value = value[key]
    return value


def _rows(location: Location, tensor: Tensor) -> Tensor:
    if location.n_axes == 2 and location.token_axis == 0:
        return tensor
    # [1, T, D] of the Transformers backend, [T, heads, D / heads] around per-head norms.
    return tensor.movedim(location.token_axis, 0).flatten(1)


def array_name(name: str) -> str:
    """A location's name as a Zarr array name: brackets become dots.

    Raises:
        UnreadableLocation: the name has a character that a store cannot hold.
    """
    array = name.replace("]", "").replace("[", ".").replace("'", "").replace('"', "")
    if not all(part and part.replace("_", "").replace("-", "").isalnum() for part in array.split(".")):
        raise UnreadableLocation(f"{name!r} cannot be the name of an array: use letters, digits, '.', '_' and '-'")
    return array
