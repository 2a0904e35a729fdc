"""One request's view of one location in one step: copies out, edits and replacements back in.

Invariants: what a block holds never shares memory with the engine; only the request's own rows are ever written; a
value that does not fit is refused while the block still runs, so the error carries the block's line.

A :class:`Passage` is the model going past a location, with every block that waits there; a :class:`Visit` is one
block's part of it. `read`, `replace` and `close` run inside the block; `apply` runs on the engine's side, in the
engine's grad and inference modes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from actors.worker.blocks.errors import BadWriteError, BadWriteTypeError


class Passage:
    """The value of a location in one step, for all blocks that wait there.

    Args:
        name: the location, for messages.
        value: the engine's own structure: tensors within tuples, lists and dicts, anything else passed through.
        n_rows: rows of all requests, which is how the token dimension of a tensor is found.
        spans: (start, stop) rows of the waiting requests, in the order in which they run.
        n_vocab: of sampled ids, how many ids there are; a replacement may then have another integer dtype.

    When many requests of one row each wait, their copies are cut from one copy of all their rows: the parts do not
    overlap, and each counts its own edits.
    """

    __slots__ = ("_first", "_last", "_shared", "_shares", "n_rows", "n_vocab", "name", "value")

    def __init__(
        self, name: str, value: Any, n_rows: int, spans: Sequence[tuple[int, int]], *, n_vocab: int | None = None
    ) -> None:
        self.name = name
        self.value = value
        self.n_rows = n_rows
        self.n_vocab = n_vocab
        self._shares: dict[int, Sequence[Tensor]] | None = None
        self._shared: dict[int, Tensor] = {}
        if len(spans) >= _MIN_SHARED:
            self._first, self._last = min(spans)[0], max(spans)[1]
            if self._last - self._first == len(spans) == sum(stop - start for start, stop in spans):
                self._shares = {}

    def copy(self, engine: Tensor, start: int, stop: int) -> Tensor:
        """A private copy of rows `start:stop` of a piece of `value`."""
        shares = self._shares
        if shares is None or torch.is_inference_mode_enabled():
            return own_rows(engine, start, stop, self.n_rows).clone()
        parts = shares.get(id(engine))
        if parts is None:
            if engine.shape[:1] != (self.n_rows,):
                return own_rows(engine, start, stop, self.n_rows).clone()
            whole = self._shared[id(engine)] = engine[self._first : self._last].clone()
            parts = shares[id(engine)] = whole.unsafe_split(1)
        return parts[start - self._first]

    def apply(self, visits: Sequence[Visit]) -> Any:
        """Write the edits of closed visits; returns the structure for the next module."""
        if self._shared and len(visits) == self._last - self._first and not any(visit.replaces for visit in visits):
            # Everyone edited the shared copies and nothing else: they go back in one piece.
            engines = visits[0].edited
            if engines.keys() <= self._shared.keys() and all(visit.edited.keys() == engines.keys() for visit in visits):
                for key, engine in engines.items():
                    engine[self._first : self._last].copy_(self._shared[key])
                return self.value
        current = self.value
        for visit in visits:
            current = visit.apply(current)
        return current


_MIN_SHARED = 4


class Visit:
    """One block's part of a passage; `start` and `stop` are its request's rows."""

    __slots__ = ("_copies", "_pending", "_replaced", "_write_back", "passage", "start", "stop", "value")

    def __init__(self, passage: Passage, start: int, stop: int, write_back: bool) -> None:
        self.passage = passage
        self.value = passage.value
        self.start = start
        self.stop = stop
        self._write_back = write_back
        self._copies: dict[int, tuple[Tensor, Tensor, int]] = {}
        self._replaced: dict[int, tuple[Any, Any]] | None = None
        self._pending: list[tuple[Tensor, Tensor]] | None = None

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
        self._fits(part, new, self.passage.name)
        if self._replaced is None:
            self._replaced = {}
        self._set(part, new, self._replaced)

    def close(self) -> None:
        """End the visit: find what was edited. Call inside the block, before it yields."""
        pending = []
        replaced = self._replaced
        if replaced is not None:
            for part, new in replaced.values():
                self._fits(part, new, self.passage.name)
                pending.append((part, new))
        if self._write_back:
            for engine, copy, version in self._copies.values():
                if replaced is not None and id(engine) in replaced:
                    continue
                # An inference tensor (the block switched that mode on) counts no edits: write it back always.
                if version == _UNCOUNTED or copy._version != version:
                    if not self._surely_fits(engine, copy):
                        self._tensor_fits(engine, copy, self.passage.name)
                    pending.append((engine, copy))
        if pending:
            self._pending = pending

    def _surely_fits(self, engine: Tensor, copy: Tensor) -> bool:
        """The common case of an edited copy: some of the rows, nothing resized."""
        shape, whole = copy.shape, engine.shape
        n_own = self.stop - self.start
        return (
            self.passage.n_vocab is None
            and len(whole) == len(shape) == 2
            and whole[0] == self.passage.n_rows > n_own == shape[0]
            and shape[1] == whole[1]
        )

    def _copy(self, engine: Tensor) -> Tensor:
        key = id(engine)
        if self._replaced is not None and key in self._replaced:
            new: Tensor = self._replaced[key][1]
            return new
        found = self._copies.get(key)
        if found is not None:
            return found[1]
        copy = self.passage.copy(engine, self.start, self.stop)
        self._copies[key] = (engine, copy, _UNCOUNTED if copy.is_inference() else copy._version)
        return copy

    def _set(self, part: Any, new: Any, replaced: dict[int, tuple[Any, Any]]) -> None:
        if isinstance(part, Tensor):
            replaced[id(part)] = (part, new)
        elif isinstance(part, (tuple, list)):
            for old_item, new_item in zip(part, new, strict=True):
                self._set(old_item, new_item, replaced)
        elif isinstance(part, dict):
            for key, old_item in part.items():
                self._set(old_item, new[key], replaced)

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
        own = own_rows(engine, self.start, self.stop, self.passage.n_rows)
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
        if new.dtype != own.dtype and not (self.passage.n_vocab and _is_integer(new.dtype)):
            raise BadWriteError(
                f"{name} needs dtype {own.dtype}, but {new.dtype} was written; convert it with .to({own.dtype})"
            )
        if self.passage.n_vocab is not None and not 0 <= int(new.min()) <= int(new.max()) < self.passage.n_vocab:
            raise BadWriteError(
                f"{name}: token id {new.flatten().tolist()} is outside the vocabulary of {self.passage.n_vocab}"
            )

    # -- on the engine's side -----------------------------------------------------------------------------------

    @property
    def changed(self) -> bool:
        return self._pending is not None

    @property
    def edited(self) -> dict[int, Tensor]:
        """The engine tensors that were edited or replaced, by id."""
        return {id(engine): engine for engine, _ in self._pending or ()}

    @property
    def replaces(self) -> bool:
        return self._replaced is not None

    def apply(self, current: Any) -> Any:
        """Write the closed visit's edits; returns the structure for the next module.

        `current` is that structure so far: `value`, or what earlier visits of the same passage made of it. An in-place
        edit goes to the engine's memory, as if the block had held a view of it. A replacement leaves that memory
        alone: the next module gets another tensor.
        """
        replaced = self._replaced or {}
        n_rows = self.passage.n_rows
        for part, _ in replaced.values():
            if len(_targets(self.value, current, part)) == 1:
                current = _copy_tensors(current, id(part))
        for engine, new in self._pending or ():
            for target in _targets(self.value, current, engine):
                if target is not engine or id(engine) not in replaced:
                    own_rows(target, self.start, self.stop, n_rows).copy_(new)
        return current


_UNCOUNTED = -1


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


def _is_integer(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and not dtype.is_complex and dtype != torch.bool


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
