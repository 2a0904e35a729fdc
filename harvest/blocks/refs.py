"""The model's modules as the caller sees them: to print, to walk, to name locations.

Values exist inside blocks only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from actors.worker.blocks.wire import Reference, Referenced

_OUTSIDE = (
    "{name} has a value only inside a block that runs with a prompt: `with model.trace(prompt):`, or "
    "`with tracer.invoke(prompt):` inside a trace without one"
)


class ModuleProxy(Referenced):
    """A module of the tree. Prints as vLLM's module; travels into a block as a reference."""

    def __init__(self, path: str, find: Callable[[], Any]) -> None:
        self.__dict__.update(_path=path, _find=find, _children={})

    _path: str
    _find: Callable[[], Any]
    _children: dict[str, ModuleProxy]

    def wire_reference(self) -> Reference:
        return ("module", self._path)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        known = self.__dict__["_children"].get(name)
        if known is not None:
            return known
        value = getattr(self._find(), name)
        return self._child(name) if _is_module(value) else value

    def _child(self, name: str) -> ModuleProxy:
        child = self._children.get(name)
        if child is None:
            find = self._find
            path = f"{self._path}.{name}" if self._path else name
            child = self._children[name] = ModuleProxy(path, lambda: getattr(find(), name))
        return child

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("output", "input", "inputs", "logits", "samples"):
            raise RuntimeError(_OUTSIDE.format(name=f"{self._path or 'model'}.{name}"))
        raise AttributeError(f"the module tree cannot be changed ({name!r} of {self._path or 'the model'})")

    def __getitem__(self, key: Any) -> Any:
        length = len(self)
        if isinstance(key, slice):
            return [self._child(str(index)) for index in range(*key.indices(length))]
        if isinstance(key, int):
            if not -length <= key < length:
                raise IndexError(f"{self._path} has {length} entries, no entry {key}")
            return self._child(str(key % length))
        getattr(self._find(), key)
        return self._child(key)

    def __len__(self) -> int:
        return len(self._find())

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        return repr(self._find())

    def _outside(self, side: str) -> NoReturn:
        raise RuntimeError(_OUTSIDE.format(name=f"{self._path or 'model'}.{side}"))

    @property
    def output(self) -> Any:
        self._outside("output")

    @property
    def input(self) -> Any:
        self._outside("input")

    @property
    def inputs(self) -> Any:
        self._outside("inputs")

    @property
    def source(self) -> Any:
        """The module's forward with the names of its operations; print it."""
        from actors.worker.blocks.operations import SourceText

        return SourceText(self._find())

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(f"{self._path or 'the model'} can be called only inside a block: here it has no weights")


def _is_module(value: Any) -> bool:
    import torch

    return isinstance(value, torch.nn.Module)
