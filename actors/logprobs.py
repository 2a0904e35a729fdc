"""`tokens/logprob`: what the sampler said of each generated token, on its way from the engine's outputs to the store.

These values do not pass through the worker with the rows: the engine hands them out when a request ends. They go with
the invoke's outcome, and are written when the unit is sealed, by the rank that writes the labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from actors.protocol import InvokeOutcome

LOGPROBS = "tokens/logprob"


class MissingLogprobs(RuntimeError):
    """The engine gave no log-probabilities for an invoke."""


class _Writer(Protocol):
    def write(self, array: str, row: int, data: NDArray[Any]) -> None: ...


def row_logprobs(positions: NDArray[np.int64], *, n_prompt: int, sampled: Sequence[float]) -> NDArray[np.float32]:
    """The log-probability of each row's own token.

    Args:
        positions: [n_rows] of an invoke's rows.
        n_prompt: length of its prompt.
        sampled: log-probability of each generated token, the last one included, which has no row.

    Returns:
        [n_rows] float32, NaN for tokens of the prompt.
    """
    values = np.full(len(positions), np.nan, np.float32)
    generated = positions >= n_prompt
    values[generated] = np.asarray(sampled, np.float32)[positions[generated] - n_prompt]
    return values


def write_logprobs(writer: _Writer, outcomes: Sequence[InvokeOutcome]) -> None:
    """Write those of a whole unit; `MissingLogprobs` names an invoke without."""
    for outcome in outcomes:
        if outcome.logprobs is None:
            raise MissingLogprobs(f"the engine gave no logprobs for invoke {outcome.invoke}, but the store has them")
        writer.write(LOGPROBS, outcome.unit_row, outcome.logprobs)
