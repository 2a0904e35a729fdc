"""What every module of a model receives and returns, found by one pass on the meta device.

A pass costs no arithmetic and no memory: only shapes flow. It is run at TP=1, so the widths are full widths, and
with a number of tokens that occurs nowhere else in the model, so the token axis of every value is known.

Kernels that have no meta implementation (attention, fused experts, quantised products) are replaced for the pass
by stand-ins that return an empty tensor of the right shape.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.fused_moe import MoERunner
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.utils.torch_utils import set_default_torch_dtype

_TOKEN_COUNTS = (13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97, 101, 103, 107, 109)


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorValue:
    """A tensor that a module received or returned."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    token_axis: int | None
    """Axis that counts tokens, None when there is none."""
    identity: int
    """Equal for values that are the same tensor object."""

    @property
    def width(self) -> int | None:
        """Features per token at full width, None for a tensor without a token axis."""
        if self.token_axis is None:
            return None
        width = 1
        for axis, size in enumerate(self.shape):
            width *= 1 if axis == self.token_axis else size
        return width

    def __str__(self) -> str:
        axes = ", ".join("tokens" if axis == self.token_axis else str(n) for axis, n in enumerate(self.shape))
        return f"[{axes}] {str(self.dtype).removeprefix('torch.')}"


# A value is a TensorValue, a tuple or dict of values, or the type of something that is not a tensor.
Value = Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One call of a module's forward."""

    args: tuple[Value, ...]
    kwargs: dict[str, Value]
    output: Value


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelValues:
    """All calls of one pass, by module path."""

    calls: dict[str, tuple[Call, ...]]
    failure: str | None
    """Why the pass ended early, None when it ran to the logits."""


def observe(model: nn.Module, vllm_config: VllmConfig) -> ModelValues:
    """Run one meta pass over a meta-device tree; call it inside ``parallel_groups``."""
    n_tokens = _unused_size(model)
    calls: dict[str, list[Call]] = {}
    failure: str | None = None
    with (
        _stand_in_kernels(model),
        recording(model, n_tokens, calls),
        set_current_vllm_config(vllm_config),
        set_default_torch_dtype(vllm_config.model_config.dtype),
        set_forward_context(None, vllm_config, num_tokens=n_tokens),
        torch.inference_mode(),
        torch.device("meta"),
    ):
        ids, positions = torch.zeros(n_tokens, dtype=torch.int32), torch.zeros(n_tokens, dtype=torch.int64)
        try:
            hidden = model(input_ids=ids, positions=positions, intermediate_tensors=None, inputs_embeds=None)
            model.compute_logits(hidden)
        except Exception as error:  # a kernel we do not know: what ran before it is known all the same
            failure = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return ModelValues(calls={path: tuple(made) for path, made in calls.items()}, failure=failure)


def _unused_size(model: nn.Module) -> int:
    used = {size for tensor in (*model.parameters(), *model.buffers()) for size in tensor.shape}
    for count in _TOKEN_COUNTS:
        if not any(size % count == 0 and size < 64 * count for size in used if size):
            return count
    return 7919


def describe_value(value: object, n_tokens: int) -> Value:
    """The Value of what a module received or returned."""
    if isinstance(value, Tensor):
        shape = tuple(value.shape)
        axes = [axis for axis, size in enumerate(shape) if size == n_tokens]
        return TensorValue(shape=shape, dtype=value.dtype, token_axis=axes[0] if axes else None, identity=id(value))
    if isinstance(value, list | tuple):
        return tuple(describe_value(part, n_tokens) for part in value)
    if isinstance(value, dict):
        return {key: describe_value(part, n_tokens) for key, part in value.items()}
    return type(value)


@contextlib.contextmanager
def recording(model: nn.Module, n_tokens: int, calls: dict[str, list[Call]]) -> Iterator[None]:
    """Add every call of every module inside the model to `calls`, by path; `n_tokens` is the size of the pass."""
    kept: list[object] = []  # ids are only comparable while the tensors live

    def recorder(path: str, forward: Callable[..., object]) -> Callable[..., object]:
        def recorded(*args: object, **kwargs: object) -> object:
            received = describe_value(args, n_tokens), describe_value(kwargs, n_tokens)
            output = forward(*args, **kwargs)
            kept.append((args, kwargs, output))
            call = Call(args=received[0], kwargs=received[1], output=describe_value(output, n_tokens))
            calls.setdefault(path, []).append(call)
            return output

        return recorded

    with contextlib.ExitStack() as undo:
        for path, module in model.named_modules():
            if path:
                undo.enter_context(_attribute(module, "forward", recorder(path, module.forward)))
        yield


@contextlib.contextmanager
def _stand_in_kernels(model: nn.Module) -> Iterator[None]:
    with contextlib.ExitStack() as undo:
        for module in model.modules():
            if isinstance(module, Attention):
                undo.enter_context(_attribute(module, "forward", _attention(module)))
            elif isinstance(module, MLAAttention):
                undo.enter_context(_attribute(module, "forward", _latent_attention))
            elif isinstance(module, MoERunner):
                undo.enter_context(_attribute(module, "forward", _experts(module)))
            elif isinstance(module, LinearBase | VocabParallelEmbedding):
                undo.enter_context(_attribute(module, "quant_method", _ProductMethod(module.quant_method)))
            native = getattr(module, "forward_native", None)
            if callable(native) and hasattr(module, "_forward_method"):
                undo.enter_context(_attribute(module, "_forward_method", native))
        for operation in _ir_operations():
            undo.enter_context(operation.set_priority(["native"]))
        yield


def _ir_operations() -> list[Any]:
    """Operations of vLLM that choose a kernel at each call; in eager mode on a GPU, ones without a meta version."""
    try:
        from vllm.ir.op import IrOp
    except ImportError:  # versions before vllm.ir
        return []
    return list(IrOp.registry.values())


@contextlib.contextmanager
def _attribute(module: nn.Module, name: str, value: object) -> Iterator[None]:
    """Set an attribute in the instance's own dict and put back what the dict held."""
    own = module.__dict__
    held, before = name in own, own.get(name)
    own[name] = value
    try:
        yield
    finally:
        if held:
            own[name] = before
        else:
            del own[name]


def _attention(module: Any) -> Callable[..., Tensor]:
    width = module.num_heads * getattr(module, "head_size_v", module.head_size)

    def attend(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        shape = kwargs.get("output_shape") or (args[0] if args else None) or (query.shape[0], width)
        return query.new_empty(tuple(shape))

    return attend


def _latent_attention(q: Tensor, kv_c: Tensor, k_pe: Tensor, output_shape: Any = None, **kwargs: Any) -> Tensor:
    return q.new_empty(tuple(output_shape)) if output_shape is not None else q.new_empty(q.shape[0], q.shape[-1])


def _experts(module: Any) -> Callable[..., Tensor]:
    def run(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # The runner calls these itself, inside its fused operation.
        if module.gate is not None:
            module.gate(hidden_states)
        if module.shared_experts is not None:
            module.shared_experts._layer(hidden_states)
        return torch.empty_like(hidden_states)

    return run


class _ProductMethod:
    """A weight method whose products are empty tensors, whatever the quantisation."""

    def __init__(self, method: Any) -> None:
        self._method = method

    def __getattr__(self, name: str) -> Any:
        return getattr(self._method, name)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        width = (
            layer.num_embeddings_per_partition
            if isinstance(layer, VocabParallelEmbedding)
            else getattr(layer, "output_size_per_partition", layer.output_size)
        )
        return x.new_empty(*x.shape[:-1], width)

    def embedding(self, layer: Any, ids: Tensor) -> Tensor:
        return torch.empty(*ids.shape, layer.embedding_dim, dtype=torch.get_default_dtype())
