"""Grad and inference modes at the border between the engine and its blocks.

Both are the thread's, and engine and blocks share the forward thread. Blocks run with both switched off, so that what
they hold are ordinary tensors; the engine runs in inference mode. A block that switched a mode on and then waits for a
location keeps it for itself.
"""

from __future__ import annotations

from typing import Any

import torch

_InferenceMode: Any = torch._C._InferenceMode
_set_grad_enabled: Any = torch._C._set_grad_enabled


class BlockModes:
    """`with BlockModes() as modes:` around the engine's switches to blocks."""

    __slots__ = ("_guard",)

    def __enter__(self) -> BlockModes:
        # The guard remembers all of the thread's modes, grad included, and puts them back.
        self._guard = _InferenceMode(False)
        self._guard.__enter__()
        _set_grad_enabled(False)
        return self

    def __exit__(self, *_: object) -> None:
        self._guard.__exit__(None, None, None)

    def reset(self) -> None:
        """Back to a block's default modes, whatever one left behind."""
        self.__exit__()
        self.__enter__()


def enter_modes(grad: bool, inference: bool) -> Any:
    """Put a block's own modes in place; the result's ``__exit__`` takes them away."""
    guard = _InferenceMode(inference)
    guard.__enter__()
    _set_grad_enabled(grad)
    return guard
