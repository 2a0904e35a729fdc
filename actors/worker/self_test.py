"""Self-test of an engine at its start: does this vLLM, with these taps, hand out each request's own rows?

Two short prompts of equal length and different tokens go through the engine one after the other. For each, the tokens
that the pass was fed must be the prompt's, each position must come once, and each location must give rows that are
finite, not all zero, and not those of the other prompt (a tap that a compiled or captured pass has lost leaves its old
buffer behind).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

SELF_TEST_UNIT = -1
PROMPTS = ((3, 1, 4, 1, 5, 9, 2), (2, 7, 1, 8, 2, 8, 1))


class SelfTestError(RuntimeError):
    """The engine does not hand out the rows that it should; nothing may be harvested with it."""


@dataclass(slots=True)
class SelfTest:
    """What the passes of the self-test delivered on one rank, by prompt."""

    token_ids: dict[int, list[int]] = field(default_factory=dict)
    positions: dict[int, list[int]] = field(default_factory=dict)
    rows: dict[int, dict[str, NDArray[np.float32]]] = field(default_factory=dict)

    def add(
        self,
        prompt: int,
        token_ids: Sequence[int],
        positions: Sequence[int],
        rows: Mapping[str, NDArray[np.float32]],
    ) -> None:
        """Take in one pass, of one prompt."""
        self.token_ids.setdefault(prompt, []).extend(token_ids)
        self.positions.setdefault(prompt, []).extend(positions)
        for name, part in rows.items():
            kept = self.rows.setdefault(prompt, {})
            kept[name] = np.concatenate([kept[name], part]) if name in kept else part

    def problems(self, *, wanted: Sequence[int], names: Sequence[str]) -> list[str]:
        """What is wrong, in words.

        Args:
            wanted: positions that get a row.
            names: locations of this rank.
        """
        found: list[str] = []
        for prompt, ids in enumerate(PROMPTS):
            if self.positions.get(prompt, []) != list(wanted):
                found.append(f"positions {self.positions.get(prompt, [])} instead of {list(wanted)}")
            elif self.token_ids[prompt] != [ids[position] for position in wanted]:
                found.append(f"rows of tokens {self.token_ids[prompt]} instead of {[ids[p] for p in wanted]}")
        for name in names if not found else ():
            first, second = (self.rows[prompt][name] for prompt in range(len(PROMPTS)))
            if len(first) != len(wanted) or len(second) != len(wanted):
                found.append(f"{name}: {len(first)} and {len(second)} rows instead of {len(wanted)}")
            elif not (np.isfinite(first).all() and np.isfinite(second).all()):
                found.append(f"{name}: rows that are not finite")
            elif not (first.any() and second.any()):
                found.append(f"{name}: rows that are all zero")
            elif np.array_equal(first, second):
                found.append(f"{name}: the same rows for different prompts")
        return found


def explain(problems: Sequence[str], version: str) -> str:
    """The error's text."""
    return (
        f"vLLM {version} failed the self-test of its taps: {'; '.join(problems)}. Harvesting with it would store wrong "
        "rows; use a version that the README names, or engine.vllm.enforce_eager = true"
    )


def requests_of(wanted: int) -> list[dict[str, Any]]:
    """`harvest` values of the self-test's requests."""
    return [
        {"unit": SELF_TEST_UNIT, "attempt": 0, "invoke": prompt, "unit_row": prompt * wanted, "n_prompt": len(ids)}
        for prompt, ids in enumerate(PROMPTS)
    ]
