"""Errors and warnings of the block client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harvest.errors import HarvestError


class BlockError(HarvestError, RuntimeError):
    """A block failed. The original error is `__cause__`; the engine and its other requests went on.

    Attributes:
        file, line, text: the block's statement that failed; `line` None when it is not known.
        location: the location that the block last asked for, such as "model.layers.3.mlp.output"; None for none.
        step: the step in which it failed, from 0.
        invoke: which request of the trace, in the order of submission, from 0.
        others: the errors of further requests of the same trace.
        results: the results of the whole trace; those of failed requests hold what they saved before.
    """

    def __init__(
        self,
        message: str,
        *,
        file: str,
        line: int | None,
        text: str,
        location: str | None,
        step: int,
        invoke: int,
    ) -> None:
        super().__init__(message)
        self.file = file
        self.line = line
        self.text = text
        self.location = location
        self.step = step
        self.invoke = invoke
        self.others: Sequence[BlockError] = ()
        self.results: Sequence[Any] = ()


class SourceError(HarvestError, RuntimeError):
    """A `with` body cannot be taken from source; the message points to the function form."""


class LoopCutError(HarvestError, RuntimeError):
    """With ``strict=True``: a request ended before a bounded loop had all its steps."""


class LoopCutWarning(UserWarning):
    """A request ended before a bounded loop had all its steps; statements after the loop did not run."""


class EngineReplacedError(HarvestError, RuntimeError):
    """The engine broke down during a trace; the next trace starts a new one."""
