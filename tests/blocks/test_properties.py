"""Random batches of random blocks give each request what it would get alone."""

from __future__ import annotations

from typing import Any, Literal

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.blocks.toy import WIDTH, ToyEngine, ToyModel, ToyRequest

N_LAYERS = 3
Kind = Literal["read", "add", "set last", "replace", "fail", "skip"]
Plan = dict[tuple[int, int], tuple[Kind, float]]
"""(step, layer) -> what the block does to that layer's inner output, and with which number."""

plans = st.dictionaries(
    st.tuples(st.integers(0, 3), st.integers(0, N_LAYERS - 1)),
    st.tuples(st.sampled_from(["read", "add", "set last", "replace", "fail", "skip"]), st.integers(1, 50).map(float)),
    max_size=8,
)
requests = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4), plans, st.booleans()), min_size=1, max_size=7)


def make_block(plan: Plan) -> Any:
    def block(model: Any, tracer: Any) -> list[Any]:
        kept = []
        for step in tracer.all():
            for index, layer in enumerate(model.layers):
                kind, number = plan.get((step, index), ("skip", 0.0))
                if kind == "skip":
                    continue
                value = layer.inner.output
                kept.append((step, index, value.clone()))
                if kind == "add":
                    value += number
                elif kind == "set last":
                    value[-1] = number
                elif kind == "replace":
                    layer.inner.output = torch.full_like(value, number)
                elif kind == "fail":
                    value[:] = -1
                    raise ValueError(number)
        return kept

    return block


def expected(number: int, n_prompt: int, n_steps: int, plan: Plan, clone_reads: bool) -> tuple[list[Any], list[Any]]:
    """(final rows of each step, what the block kept), request by request and without the runtime."""
    seen, kept = [], []
    for step in range(n_steps):
        positions = range(n_prompt) if step == 0 else range(n_prompt + step - 1, n_prompt + step)
        hidden = torch.tensor([100.0 * number + position for position in positions])[:, None].expand(-1, WIDTH).clone()
        failed = False
        for index in range(N_LAYERS):
            kind, value = plan.get((step, index), ("skip", 0.0))
            if kind != "skip" and not failed:
                kept.append((step, index, hidden.clone()))
                if kind == "add" and not clone_reads:
                    hidden = hidden + value
                elif kind == "set last" and not clone_reads:
                    hidden[-1] = value
                elif kind == "replace":
                    hidden = torch.full_like(hidden, value)
                elif kind == "fail":
                    failed = True
            hidden = hidden + index + 1
        seen.append(hidden)
        if failed:
            return seen, []
    return seen, kept


@settings(max_examples=150, deadline=None)
@given(requests, st.randoms(use_true_random=False))
def test_each_request_is_as_if_it_were_alone(drawn: list[Any], random: Any) -> None:
    order = list(range(len(drawn)))
    random.shuffle(order)
    batch = [
        ToyRequest(make_block(plan), n_prompt=n_prompt, n_steps=n_steps, options={"clone_reads": clone_reads})
        for n_prompt, n_steps, plan, clone_reads in drawn
    ]
    outcomes = ToyEngine(ToyModel(N_LAYERS)).run(*batch, order=order)
    for number, (n_prompt, n_steps, plan, clone_reads) in enumerate(drawn):
        seen, kept = expected(number, n_prompt, n_steps, plan, clone_reads)
        assert len(batch[number].seen) == len(seen)
        for mine, alone in zip(batch[number].seen, seen, strict=True):
            assert torch.equal(mine, alone)
        outcome = outcomes[number]
        assert outcome.steps == len(seen)
        if outcome.failure is None:
            assert [entry[:2] for entry in outcome.value] == [entry[:2] for entry in kept]
            for mine, alone in zip(outcome.value, kept, strict=True):
                assert torch.equal(mine[2], alone[2])
        else:
            assert isinstance(outcome.failure.error, ValueError)
            assert kept == []
