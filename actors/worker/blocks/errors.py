"""What can go wrong in a block. Each of these is raised inside the block, at the statement that caused it."""

from __future__ import annotations


class OutOfOrderError(RuntimeError):
    """A location was asked for after the forward pass had gone past it."""


class LocationNotReachedError(RuntimeError):
    """The step ended and the location was never visited: the model does not run it in this step."""


class LocationError(ValueError):
    """There is no such location, or it cannot be read through this path."""


class BadWriteError(ValueError):
    """A block wrote a value that does not fit: wrong rows, width, dtype, or number of parts."""


class BadWriteTypeError(TypeError):
    """A block wrote something that is not a tensor where the engine needs one."""


class RequestFinishedError(RuntimeError):
    """A block asked for a value of a step after its request had finished."""


class SplitPromptError(RuntimeError):
    """The engine split a prompt over several steps, so the block would not see it whole."""


class SavedTooLargeError(MemoryError):
    """What a block saved is larger than the engine lets travel back to the caller."""


class BlockTimeoutError(TimeoutError):
    """A block ran longer between two locations than the engine allows."""


class BlockInterrupt(BaseException):
    """Raised inside a block to unwind it; ``except Exception`` in user code does not see it."""


class BlockStopped(BlockInterrupt):
    """``tracer.stop()`` was called."""


class LoopCut(BlockInterrupt):
    """The request ended before a bounded ``tracer.iter`` loop had all its steps."""
