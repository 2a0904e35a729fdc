"""What a trace or a run returns: one result per request, and the caller's variables from all of them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from actors.worker.blocks.engine import BlockRun
from actors.worker.blocks.wire import BlockFailure
from harvest.blocks.errors import BlockError, LoopCutError, LoopCutWarning


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockResult:
    """What one request's block left behind.

    With ``n`` > 1 the block ran once per sequence, and `saves`, `value` and `steps` hold lists of n.
    """

    saves: dict[str, Any]
    """What the block saved, by name. Tensors are on the CPU."""
    value: Any
    """What the block's function returned; None for `with` bodies."""
    output: Any
    """vLLM's RequestOutput."""
    steps: Any
    """Steps that ran, the prompt's step counted; an int (a list with ``n`` > 1)."""
    cut: bool
    """Whether the request ended before a bounded loop had all its steps."""
    error: BlockError | None = field(default=None)

    @property
    def text(self) -> str:
        """The generated text of the first sequence."""
        return str(self.output.outputs[0].text)


def make_results(runs: Sequence[BlockRun]) -> list[BlockResult]:
    """One result per run, in order; errors are in them, not raised."""
    results = []
    for index, run in enumerate(runs):
        outcomes = run.outcomes
        steps: Any
        failure = next((outcome.failure for outcome in outcomes if outcome.failure is not None), None)
        error = None if failure is None else _make_error(failure, index)
        cut = any(outcome.cut is not None for outcome in outcomes)
        if len(outcomes) == 1:
            only = outcomes[0]
            saves, value, steps = only.saves, only.value, only.steps
        elif outcomes:
            names = dict.fromkeys(name for outcome in outcomes for name in outcome.saves)
            saves = {name: [outcome.saves.get(name) for outcome in outcomes] for name in names}
            value = [outcome.value for outcome in outcomes]
            steps = [outcome.steps for outcome in outcomes]
        else:
            saves, value, steps = {}, None, len(run.output.outputs[0].token_ids)
        results.append(BlockResult(saves=saves, value=value, output=run.output, steps=steps, cut=cut, error=error))
    return results


def report_cut_loops(runs: Sequence[BlockRun], *, strict: bool, stacklevel: int) -> None:
    """Warn in the caller of loops that ended early, or raise.

    Raises:
        LoopCutError: with `strict`.
    """
    for index, run in enumerate(runs):
        for outcome in run.outcomes:
            if outcome.cut is None:
                continue
            wanted, steps = outcome.cut
            message = (
                f"request {index} ended after {steps} steps, before step {wanted} of a tracer.iter loop; the "
                "statements after the loop did not run. Check the length of what you collected, or pass "
                "ignore_eos=True and enough max_tokens"
            )
            if strict:
                raise LoopCutError(message)
            warnings.warn(message, LoopCutWarning, stacklevel=stacklevel + 1)


def raise_failures(results: Sequence[BlockResult]) -> None:
    """Raise the first request's error, from the block's own; later ones are in its `others`.

    Raises:
        BlockError: a block failed.
    """
    errors = [result.error for result in results if result.error is not None]
    if not errors:
        return
    first = errors[0]
    first.others = tuple(errors[1:])
    first.results = tuple(results)
    if first.others:
        first.add_note(f"{len(first.others)} more requests failed; see .others")
    raise first from first.__cause__


def merge_saves(results: Sequence[BlockResult], shared: dict[str, Any]) -> dict[str, Any]:
    """The caller's variables from all requests of a trace.

    A name saved by one request is its value; by several, the list of values in order of submission. A container that
    was saved above the invokes (`shared`, as it was then) is merged instead.
    """
    merged: dict[str, Any] = dict(shared)
    names = dict.fromkeys(name for result in results for name in result.saves)
    for name in names:
        values = [result.saves[name] for result in results if name in result.saves]
        if name in shared:
            merged[name] = merge_container(shared[name], values)
        else:
            merged[name] = values[0] if len(values) == 1 else values
    return merged


def merge_container(base: Any, values: Sequence[Any]) -> Any:
    """One container from the copies that several blocks changed, each starting from `base`.

    Lists: slots that were there keep the last value other than None that a block put in them, and what blocks
    appended follows in order. Dicts: the union of what blocks put in. Sets: the union. Anything else: the last.
    """
    if isinstance(base, list) and all(isinstance(value, list) and len(value) >= len(base) for value in values):
        merged = list(base)
        for value in values:
            for index, item in enumerate(value[: len(base)]):
                if item is not None:
                    merged[index] = item
            merged += value[len(base) :]
        base[:] = merged
        return base
    if isinstance(base, dict) and all(isinstance(value, dict) for value in values):
        for value in values:
            base.update(value)
        return base
    if isinstance(base, set) and all(isinstance(value, set) for value in values):
        for value in values:
            base |= value
        return base
    return values[-1]


def _make_error(failure: BlockFailure, invoke: int) -> BlockError:
    place = f'{failure.file}:{failure.line}: "{failure.text}"' if failure.line is not None else failure.file
    at = f" at {failure.location}" if failure.location else ""
    error = BlockError(
        f"{type(failure.error).__name__} in the block of request {invoke}, step {failure.step}{at}: {failure.error}\n"
        f"  {place}",
        file=failure.file,
        line=failure.line,
        text=failure.text,
        location=failure.location,
        step=failure.step,
        invoke=invoke,
    )
    failure.error.add_note(f"In the block (most recent call last):\n{failure.traceback}")
    error.__cause__ = failure.error
    return error
