"""Which of a layer's returned tensors is the residual stream, found from the data flow of the model.

vLLM fuses the add into the next norm, so most layers return a pair `(hidden, residual)` whose sum is the stream; in
some families the first tensor already is the stream. Nothing about a pair says which. The next layer does:

- its first norm is one of vLLM's own RMS norms and gets both tensors: that norm adds them, so the sum is the stream;
- its first norm gets the first tensor alone: the first tensor is the stream;
- the layer returns one tensor, and the next layer gets it: it is the stream.

Anything else is refused rather than guessed, unless the family's table names it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

from actors.location_errors import UnreadableLocation
from actors.worker.locations.values import Call, ModelValues, TensorValue


@dataclass(frozen=True, kw_only=True, slots=True)
class Stream:
    """Elements of a layer's output that add up to the stream: one or two."""

    element: tuple[int | str, ...]
    addend: tuple[int | str, ...] | None


FIRST_OF_PAIR = Stream(element=(0,), addend=None)


def stream_after(model: nn.Module, values: ModelValues, layers: str, index: int, final_norm: str | None) -> Stream:
    """How to read the residual stream from the output of layer `index`.

    Raises:
        UnreadableLocation: the data flow does not say.
    """
    path = f"{layers}.{index}"
    output = values.calls[path][0].output
    if isinstance(output, TensorValue):
        return Stream(element=(), addend=None)
    tensors = [part for part in output if isinstance(part, TensorValue)] if isinstance(output, tuple) else []
    if len(tensors) == 1 and output[0] is tensors[0]:
        return FIRST_OF_PAIR
    if len(tensors) == 2 and tensors == [output[0], output[1]]:
        ids = (output[0].identity, output[1].identity)
        for norm, call in _norms_after(model, values, f"{layers}.{index + 1}", final_norm):
            received = tuple(value.identity for value in call.args if isinstance(value, TensorValue))
            if received == ids and isinstance(norm, RMSNorm | GemmaRMSNorm):
                return Stream(element=(0,), addend=(1,))
            if received == ids[:1]:
                return FIRST_OF_PAIR
    raise UnreadableLocation(
        f"cannot tell the residual stream after {path} ({type(model.get_submodule(path)).__name__}) from what the "
        f"layer returns; read a module's output instead, such as {path}.output[0]"
    )


def _norms_after(
    model: nn.Module, values: ModelValues, next_layer: str, final_norm: str | None
) -> Iterator[tuple[Any, Call]]:
    """Calls of the modules that may receive a layer's pair: the next layer's children, or the final norm."""
    if next_layer in values.calls:
        for name, child in model.get_submodule(next_layer).named_children():
            for call in values.calls.get(f"{next_layer}.{name}", ()):
                yield child, call
    elif final_norm is not None:
        for call in values.calls.get(final_norm, ()):
            yield model.get_submodule(final_norm), call
