"""`harvest.save`: keep a value from anywhere in a block, also from a helper function."""

from __future__ import annotations

import sys
from typing import TypeVar

Value = TypeVar("Value")


def save(value: Value, name: str | None = None) -> Value:
    """Mark `value` to be sent back to the caller when its request ends; returns it.

    Args:
        value: anything that pickles. In a function run by `model.run` it comes back in `BlockResult.saves`.
        name: the name it comes back under. Without one: the variables of the calling function that hold it at the
            end, else "saved_0", "saved_1" ... In a `with` body: the variables that hold it.

    Raises:
        RuntimeError: called outside of a block.
    """
    from actors.worker.blocks.runtime import current_runtime
    from harvest.blocks.trace import save_here

    runtime = current_runtime()
    if runtime is not None and runtime.current is not None:
        marked: Value = runtime.current.mark_call(value, name, sys._getframe(1))
        return marked
    kept: Value = save_here(value)
    return kept
