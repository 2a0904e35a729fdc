"""Packing what a block leaves behind, and unpacking it in the caller."""

from __future__ import annotations

import dataclasses
from typing import Any

from actors.worker.blocks.errors import LocationError, SavedTooLargeError
from actors.worker.blocks.wire import BlockFailure, BlockOutcome, Parcel, Reference, pack, unpack


def pack_outcome(outcome: BlockOutcome, *, limit_bytes: int, keep_buffers: bool) -> Parcel:
    """The outcome as a parcel. What cannot travel becomes a failure of this block that names the value."""
    failure = outcome.failure
    if failure is not None and not _travels(failure.error):
        # The original cannot be rebuilt over there: keep its name and text.
        failure = dataclasses.replace(failure, error=RuntimeError(f"{type(failure.error).__name__}: {failure.error}"))
        outcome = dataclasses.replace(outcome, failure=failure)
    try:
        return pack(outcome, limit_bytes=limit_bytes, refuse_references=True, keep_buffers=keep_buffers, gather=True)
    except Exception as error:
        problem = error
    kept: dict[str, Any] = {}
    value = None
    if not isinstance(problem, SavedTooLargeError):
        culprits = []
        for name, saved in outcome.saves.items():
            if _travels(saved):
                kept[name] = saved
            else:
                culprits.append(name)
        value = outcome.value if _travels(outcome.value) else None
        if outcome.value is not None and value is None:
            culprits.append("the returned value")
        if culprits:
            problem = TypeError(f"{', '.join(culprits)} cannot be sent back to the caller: {problem}")
    if failure is None:
        failure = BlockFailure(
            error=problem, file="", line=None, text="", location=None, step=outcome.steps - 1, traceback=str(problem)
        )
    return pack(dataclasses.replace(outcome, saves=kept, value=value, failure=failure), keep_buffers=keep_buffers)


def unpack_outcome(parcel: Parcel) -> BlockOutcome:
    """The outcome in the caller's process; tensors on CPU."""
    outcome: BlockOutcome = unpack(parcel, _refuse_reference)
    return outcome


def _travels(value: Any) -> bool:
    try:
        unpack(pack(value, refuse_references=True), _refuse_reference)
    except Exception:
        return False
    return True


def _refuse_reference(reference: Reference) -> Any:
    kind, path = reference
    raise LocationError(f"a {kind} {path} was saved; save its value, not the {kind} itself")
