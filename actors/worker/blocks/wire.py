"""What travels between the caller and the engine: a block on its way in, its outcome on its way back.

Everything is pickled once, by value, also when the engine lives in the caller's process: a block then behaves the
same at TP=1 and TP=2, and never shares an object with its caller. Objects that exist on both sides (the model, its
modules, the tracer, the tokenizer) travel as references. Tensors travel as their bytes; on arrival they are placed on
the receiver's device.
"""

from __future__ import annotations

import contextvars
import io
import marshal
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import torch

from actors.worker.blocks.errors import LocationError, SavedTooLargeError

EXTRA_ARGS_KEY = "harvest_block"
"""The name under which a block rides in vLLM's ``SamplingParams.extra_args``."""

Reference = tuple[str, str]
"""("model" | "module" | "tracer" | "tokenizer", path); the path is empty except for modules."""


class Referenced:
    """Base of objects that travel by name."""

    def wire_reference(self) -> Reference:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockCode:
    """A block's program. Exactly one of `code` and `function` is set."""

    code: bytes | None
    """A marshalled code object that runs with `names` as its globals."""
    function: Any
    """A plain function of (model) or (model, tracer)."""
    names: dict[str, Any]
    """Values of the caller's names that `code` reads."""
    filename: str
    source: str
    """The block's text as the user wrote it; for errors and provenance."""
    saved_names: tuple[str, ...] = ()
    """Of `names`, those whose values the trace saved before it opened this request."""

    def load_code(self) -> CodeType:
        assert self.code is not None
        code = _CODE_CACHE.get(self.code)
        if code is None:
            if len(_CODE_CACHE) >= 256:
                _CODE_CACHE.clear()
            code = _CODE_CACHE[self.code] = marshal.loads(self.code)
        return code


_CODE_CACHE: dict[bytes, CodeType] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockFailure:
    """Why a block failed, and where."""

    error: BaseException
    file: str
    line: int | None
    text: str
    """The source line, stripped; empty when it is not known."""
    location: str | None
    """The location that the block last asked for."""
    step: int
    traceback: str


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockOutcome:
    """What one run of a block leaves behind."""

    saves: dict[str, Any]
    value: Any
    steps: int
    """Steps of the request that the block's engine saw."""
    cut: tuple[int, int] | None
    """(step that a bounded loop waited for, steps that there were) when the loop was cut short."""
    stopped: bool
    failure: BlockFailure | None


# Smaller tensors of a device come to the host together: a copy of its own costs each of them a wait for the device.
GATHERED_BYTES = 1 << 20
_UNGATHERED_DEVICES = ("cpu", "meta")


@dataclass(frozen=True, kw_only=True, slots=True)
class GatheredTensors:
    """Bytes of device tensors, one after the other."""

    raw: Any
    """[bytes] uint8 numpy array."""
    specs: tuple[tuple[torch.dtype, tuple[int, ...], int], ...]
    """dtype, shape and bytes of each."""

    @classmethod
    def of(cls, tensors: list[torch.Tensor]) -> GatheredTensors:
        """Bring tensors of one device to the host in one copy."""
        with torch.inference_mode(False), torch.no_grad():
            flat = [_plain(tensor).contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
            raw = torch.cat(flat).to("cpu").numpy()
        specs = tuple(
            (tensor.dtype, tuple(tensor.shape), len(each)) for tensor, each in zip(tensors, flat, strict=True)
        )
        return cls(raw=raw, specs=specs)

    def tensors(self) -> list[torch.Tensor]:
        """The tensors, each in memory of its own."""
        found, begin = [], 0
        for dtype, shape, n_bytes in self.specs:
            found.append(_load_tensor(bytearray(self.raw[begin : begin + n_bytes]), dtype, shape))
            begin += n_bytes
        return found


@dataclass(slots=True)
class Parcel:
    """Pickled bytes with the buffers kept beside them, so that in one process large tensors are not copied."""

    head: bytes
    buffers: list[Any] = field(default_factory=list)
    gathered: GatheredTensors | None = None


class _Pickler(cloudpickle.Pickler):
    def __init__(
        self,
        file: io.BytesIO,
        *,
        tokenizer: Any = None,
        limit_bytes: int | None = None,
        refuse_references: bool = False,
        buffer_callback: Callable[[Any], Any] | None = None,
        gather: bool = False,
    ) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffer_callback)
        self._gathers = gather
        self._tokenizer = tokenizer
        self._limit_bytes = limit_bytes
        self._refuse_references = refuse_references
        self._n_bytes = 0
        self._places: dict[int, int] = {}
        self.gathered: list[torch.Tensor] = []

    def persistent_id(self, obj: Any) -> Reference | tuple[str, int] | None:
        if self._gathers and isinstance(obj, torch.Tensor):
            return self._gather(obj)
        if isinstance(obj, Referenced):
            kind, path = obj.wire_reference()
            if self._refuse_references:
                raise LocationError(f"a {kind} {path} was saved; save its value, not the {kind} itself")
            return (kind, path)
        if obj is self._tokenizer and obj is not None:
            return ("tokenizer", "")
        return None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor) and obj.layout == torch.strided and not obj.is_quantized:
            return self._reduce_tensor(obj)
        if isinstance(obj, CodeType):
            # cloudpickle would forget the file, which errors name.
            return (marshal.loads, (marshal.dumps(obj),))
        return super().reducer_override(obj)

    def _gather(self, tensor: torch.Tensor) -> tuple[str, int] | None:
        if (
            tensor.device.type in _UNGATHERED_DEVICES
            or tensor.layout != torch.strided
            or tensor.is_quantized
            or not 0 < tensor.nbytes < GATHERED_BYTES
        ):
            return None
        # A tensor that is met again stays the same one.
        place = self._places.setdefault(id(tensor), len(self.gathered))
        if place == len(self.gathered):
            self._count(tensor)
            self.gathered.append(tensor)
        return (_TENSOR, place)

    def _count(self, tensor: torch.Tensor) -> None:
        self._n_bytes += tensor.numel() * tensor.element_size()
        if self._limit_bytes is not None and self._n_bytes > self._limit_bytes:
            raise SavedTooLargeError(
                f"the block's saved values take more than {self._limit_bytes:,} bytes. Save fewer steps or rows, "
                "reduce them in the block, or raise VLLM(..., max_saved_bytes=...)"
            )

    def _reduce_tensor(self, tensor: torch.Tensor) -> Any:
        self._count(tensor)
        with torch.inference_mode(False), torch.no_grad():
            if tensor.device.type == "meta":
                raise ValueError(
                    "the value is a weight of the weightless module tree; only the engine has the real one"
                )
            flat = _plain(tensor).to("cpu").contiguous().reshape(-1)
            raw = flat.view(torch.uint8).numpy() if flat.numel() else b""
        return (_load_tensor, (pickle.PickleBuffer(raw), tensor.dtype, tuple(tensor.shape)))


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg()


def _load_tensor(raw: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    device = _DEVICE.get()
    if 0 in shape:
        return torch.empty(shape, dtype=dtype, device=device)
    view = memoryview(raw)
    if view.readonly:
        view = memoryview(bytearray(view))
    tensor = torch.frombuffer(view, dtype=dtype).reshape(shape)
    return tensor if device is None else tensor.to(device)


_DEVICE: contextvars.ContextVar[torch.device | None] = contextvars.ContextVar("harvest_wire_device", default=None)


_TENSOR = "tensor"


class _Unpickler(pickle.Unpickler):
    def __init__(self, parcel: Parcel, resolve: Callable[[Reference], Any]) -> None:
        super().__init__(io.BytesIO(parcel.head), buffers=parcel.buffers)
        self._resolve = resolve
        self._gathered = parcel.gathered.tensors() if parcel.gathered is not None else []

    def persistent_load(self, pid: Any) -> Any:
        return self._gathered[pid[1]] if pid[0] == _TENSOR else self._resolve(pid)


def pack(
    value: Any,
    *,
    tokenizer: Any = None,
    limit_bytes: int | None = None,
    refuse_references: bool = False,
    keep_buffers: bool = False,
    gather: bool = False,
) -> Parcel:
    """Pickle `value`.

    Args:
        value: anything cloudpickle takes; tensors of any device.
        tokenizer: the object that travels as "the engine's tokenizer".
        limit_bytes: the most bytes of tensor data.
        refuse_references: whether the model, its modules and the tracer are an error; for what returns to the caller.
        keep_buffers: leave large buffers outside the pickle; for a receiver in the same process.
        gather: bring small device tensors to the host together; they are beside the pickle then, too.

    Raises:
        SavedTooLargeError: the tensors exceed `limit_bytes`.
        Exception: the value cannot be pickled; the error is pickle's own.
    """
    file = io.BytesIO()
    buffers: list[Any] = []
    pickler = _Pickler(
        file,
        tokenizer=tokenizer,
        limit_bytes=limit_bytes,
        refuse_references=refuse_references,
        buffer_callback=buffers.append if keep_buffers else None,
        gather=gather,
    )
    pickler.dump(value)
    gathered = GatheredTensors.of(pickler.gathered) if pickler.gathered else None
    return Parcel(head=file.getvalue(), buffers=buffers, gathered=gathered)


def unpack(parcel: Parcel, resolve: Callable[[Reference], Any], device: torch.device | None = None) -> Any:
    """The value of a parcel, with references resolved and tensors on `device` (CPU when None)."""
    token = _DEVICE.set(device)
    try:
        return _Unpickler(parcel, resolve).load()
    finally:
        _DEVICE.reset(token)
