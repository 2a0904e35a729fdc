"""One request's view of one location in one step: copies out, edits and replacements back in.

Invariants: what a block holds never shares memory with the engine; only the request's own rows are ever written; a
value that does not fit is refused while the block still runs, so the error carries the block's line.

A visit has two halves. `read`, `replace` and `close` run inside the block; `apply` runs on the engine's side, in the
engine's grad and inference modes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from actors.worker.blocks.errors import BadWriteError, BadWriteTypeError

RowsOf = Callable[[Tensor], Tensor]
"""From an engine tensor to the view of one request's rows, or the tensor itself when it has no rows."""


class Visit:
    """The value of a location as one request sees it.

    Args:
        name: the location, for messages.
        value: the engine's own structure: tensors within tuples, lists and dicts, anything else passed through.
        start, stop: the request's rows.
        n_rows: rows of all requests, which is how the token dimension of a tensor is found.
        write_back: whether in-place edits of what was read reach the engine.
        any_integer: whether a replacement may have another integer dtype (sampled ids).
    """

    __slots__ = (
        "_any_integer",
        "_copies",
        "_n_rows",
        "_pending",
        "_replaced",
        "_write_back",
        "name",
        "start",
        "stop",
        "value",
    )

    def __init__(
        self,
        name: str,
        value: Any,
        start: int,
        stop: int,
        n_rows: int,
        *,
        write_back: bool,
        any_integer: bool = False,
    ) -> None:
        self.name = name
        self.value = value
        self.start = start
        self.stop = stop
        self._n_rows = n_rows
        self._write_back = write_back
        self._any_integer = any_integer
        self._copies: dict[int, tuple[Tensor, Tensor, int, bool]] = {}
        self._replaced: dict[int, tuple[Any, Any]] = {}
        self._pending: list[tuple[Tensor, Tensor]] = []

    # -- inside the block ---------------------------------------------------------------------------------------

    def read(self, part: Any) -> Any:
        """Copies of the own rows of `part`, a piece of `value`; the same objects at every read of this visit."""
        if isinstance(part, Tensor):
            return self._copy(part)
        if part is None:
            return None
        kind = type(part)
        if kind is tuple:
            return tuple([self.read(item) for item in part])
        if kind is list:
            return [self.read(item) for item in part]
        if kind is dict:
            return {key: self.read(item) for key, item in part.items()}
        if isinstance(part, tuple) and hasattr(part, "_fields"):
            return kind(*[self.read(item) for item in part])
        return part

    def replace(self, part: Any, new: Any) -> None:
        """Put `new` in the place of `part`, a piece of `value`; checked at once and again when the visit closes."""
        self._fits(part, new, self.name)
        self._set(part, new)

    def close(self) -> None:
        """End the visit: find what was edited. Call inside the block, before it yields."""
        if self._replaced:
            for part, new in self._replaced.values():
                self._fits(part, new, self.name)
                self._pending.append((part, new))
        if self._write_back:
            for engine, copy, version, tracked in self._copies.values():
                if id(engine) in self._replaced:
                    continue
                # An inference tensor (the block switched that mode on) counts no edits: write it back always.
                if not tracked or copy._version != version:
                    self._fits(engine, copy, self.name)
                    self._pending.append((engine, copy))

    def _copy(self, engine: Tensor) -> Tensor:
        replaced = self._replaced.get(id(engine))
        if replaced is not None:
            new: Tensor = replaced[1]
            return new
        found = self._copies.get(id(engine))
        if found is not None:
            return found[1]
        copy = own_rows(engine, self.start, self.stop, self._n_rows).clone()
        tracked = not copy.is_inference()
        self._copies[id(engine)] = (engine, copy, copy._version if tracked else 0, tracked)
        return copy

    def _set(self, part: Any, new: Any) -> None:
        if isinstance(part, Tensor):
            self._replaced[id(part)] = (part, new)
        elif isinstance(part, (tuple, list)):
            for old_item, new_item in zip(part, new, strict=True):
                self._set(old_item, new_item)
        elif isinstance(part, dict):
            for key, old_item in part.items():
                self._set(old_item, new[key])

    def _fits(self, part: Any, new: Any, name: str) -> None:
        if isinstance(part, Tensor):
            self._tensor_fits(part, new, name)
        elif isinstance(part, (tuple, list)):
            if not isinstance(new, (tuple, list)):
                raise BadWriteTypeError(
                    f"{name} holds {len(part)} parts, but a {type(new).__name__} was written; write a tuple of "
                    f"{len(part)}"
                )
            if len(new) != len(part):
                raise BadWriteError(f"{name} holds {len(part)} parts, but {len(new)} were written")
            for index, (old_item, new_item) in enumerate(zip(part, new, strict=True)):
                self._fits(old_item, new_item, f"{name}[{index}]")
        elif isinstance(part, dict):
            if not isinstance(new, dict) or set(new) != set(part):
                raise BadWriteError(f"{name} holds the names {sorted(part)}; a write must keep them")
            for key, old_item in part.items():
                self._fits(old_item, new[key], f"{name}[{key!r}]")
        elif new is not part and not _same_plain(part, new):
            raise BadWriteTypeError(
                f"{name} is {part!r}, not a tensor, and cannot be changed; a {type(new).__name__} was written"
            )

    def _tensor_fits(self, engine: Tensor, new: Any, name: str) -> None:
        own = own_rows(engine, self.start, self.stop, self._n_rows)
        if own is engine:
            raise BadWriteError(
                f"{name} of shape {list(engine.shape)} has no token rows: other requests use it too, so it cannot be "
                "written"
            )
        if not isinstance(new, Tensor):
            raise BadWriteTypeError(f"{name} needs a tensor of shape {list(own.shape)}, not a {type(new).__name__}")
        if new.shape != own.shape:
            raise BadWriteError(
                f"{name} needs a tensor of shape {list(own.shape)} (the request's own rows), but one of shape "
                f"{list(new.shape)} was written"
            )
        if new.dtype != own.dtype and not (self._any_integer and not new.dtype.is_floating_point):
            raise BadWriteError(
                f"{name} needs dtype {own.dtype}, but {new.dtype} was written; convert it with .to({own.dtype})"
            )

    # -- on the engine's side -----------------------------------------------------------------------------------

    @property
    def changed(self) -> bool:
        return bool(self._pending)

    @property
    def replaces(self) -> bool:
        return bool(self._replaced)

    def apply(self, current: Any) -> Any:
        """Write the closed visit's edits; returns the structure for the next module.

        `current` is that structure so far: `value`, or what earlier visits of the same pass made of it. An in-place
        edit goes to the engine's memory, as if the block had held a view of it. A replacement leaves that memory
        alone: the next module gets another tensor.
        """
        for key, (part, _) in self._replaced.items():
            if isinstance(part, Tensor) and len(_targets(self.value, current, part)) == 1:
                current = _copy_tensors(current, key)
        for engine, new in self._pending:
            for target in _targets(self.value, current, engine):
                if id(engine) in self._replaced and target is engine:
                    continue
                own_rows(target, self.start, self.stop, self._n_rows).copy_(new)
        return current


def own_rows(tensor: Tensor, start: int, stop: int, n_rows: int) -> Tensor:
    """The view of rows `start:stop` along the token dimension; the tensor itself when it has none.

    The token dimension has exactly `n_rows` entries and comes first, or second behind one leading entry (models on
    vLLM's Transformers backend; the leading dimension is dropped) or behind three (positions of multimodal rope).
    """
    shape = tensor.shape
    if shape and shape[0] == n_rows:
        return tensor[start:stop]
    if len(shape) >= 2 and shape[1] == n_rows:
        if shape[0] == 1:
            return tensor[0, start:stop]
        if shape[0] == 3:
            return tensor[:, start:stop]
    return tensor


def _same_plain(old: Any, new: Any) -> bool:
    if isinstance(new, Tensor):
        return False
    try:
        return bool(old == new)
    except Exception:
        return False


def _copy_tensors(value: Any, wanted: int) -> Any:
    if isinstance(value, Tensor):
        return value.clone() if id(value) == wanted else value
    if isinstance(value, tuple):
        items = [_copy_tensors(item, wanted) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [_copy_tensors(item, wanted) for item in value]
    if isinstance(value, dict):
        return {key: _copy_tensors(item, wanted) for key, item in value.items()}
    return value


def _targets(original: Any, current: Any, engine: Tensor) -> list[Tensor]:
    """The tensors that stand for `engine`: itself and, when it was copied for this location, its copy."""
    found = [engine]

    def walk(old: Any, new: Any) -> None:
        if old is engine and new is not engine:
            found.append(new)
        elif isinstance(old, (tuple, list)):
            for old_item, new_item in zip(old, new, strict=True):
                walk(old_item, new_item)
        elif isinstance(old, dict):
            for key in old:
                walk(old[key], new[key])

    if original is not current:
        walk(original, current)
    return found
