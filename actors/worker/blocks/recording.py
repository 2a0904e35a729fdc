"""`tracer.cache(...)`: modules recorded at every step without the block waiting for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from actors.worker.blocks.task import BlockTask


@dataclass(slots=True)
class RecordedStep:
    """What one module received and returned in one step, as the next module got it; own rows only."""

    output: Any = None
    inputs: Any = None


class Recorded(list[RecordedStep]):
    """All steps of one module, in order."""

    @property
    def output(self) -> Any:
        """The output of the only step, or a list over steps."""
        return self[0].output if len(self) == 1 else [step.output for step in self]

    @property
    def inputs(self) -> Any:
        """The (positional, named) arguments of the only step, or a list over steps."""
        return self[0].inputs if len(self) == 1 else [step.inputs for step in self]


class ModuleCache(dict[str, Recorded]):
    """Recorded modules by path."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorder:
    """Writes one side of one module into a cache."""

    task: BlockTask
    cache: ModuleCache
    path: str
    is_output: bool
    device: str | None
    dtype: torch.dtype | None

    def take(self, copy: Any) -> None:
        """Add a step's private copy."""
        steps = self.cache.setdefault(self.path, Recorded())
        # Inputs come first; an output without them opens its own step.
        if not self.is_output or not steps or steps[-1].output is not None:
            steps.append(RecordedStep())
        if self.is_output:
            steps[-1].output = self._placed(copy)
        else:
            steps[-1].inputs = self._placed(copy)

    def _placed(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            dtype = self.dtype if value.dtype.is_floating_point else None
            return value.to(device=self.device, dtype=dtype)
        if isinstance(value, (tuple, list)):
            return type(value)([self._placed(item) for item in value])
        if isinstance(value, dict):
            return {name: self._placed(item) for name, item in value.items()}
        return value
