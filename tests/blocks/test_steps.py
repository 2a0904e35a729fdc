"""Order, steps, logits and samples, on a toy model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from actors.worker.blocks.errors import (
    LocationNotReachedError,
    OutOfOrderError,
    RequestFinishedError,
    SplitPromptError,
)
from harvest import save
from tests.blocks.toy import VOCAB, WIDTH, ToyEngine, ToyRequest, rows, run_one

# -- order -----------------------------------------------------------------------------------------------------------


def test_reading_backwards_is_an_error() -> None:
    def block(model: Any) -> None:
        model.layers[2].output  # noqa: B018
        model.layers[0].output  # noqa: B018

    with pytest.raises(OutOfOrderError, match="gone past layers.0.output"):
        run_one(block)


def test_writing_backwards_is_an_error() -> None:
    def block(model: Any) -> None:
        model.layers[2].output  # noqa: B018
        model.layers[0].inner.output = torch.zeros(3, WIDTH)

    with pytest.raises(OutOfOrderError):
        run_one(block)


def test_a_location_that_is_not_run_is_an_error() -> None:
    with pytest.raises(LocationNotReachedError, match="unused.output"):
        run_one(lambda model: model.unused.output)


def test_an_unknown_module_is_an_error() -> None:
    with pytest.raises(AttributeError, match="nothing"):
        run_one(lambda model: model.layers[0].nothing)
    with pytest.raises(IndexError, match="3 entries"):
        run_one(lambda model: model.layers[3])


def test_a_module_that_layers_share_is_read_under_each_layers_path() -> None:
    def block(model: Any) -> Any:
        model.layers[0].shared[0].output  # noqa: B018
        before = model.layers[1].inner.output
        positions = model.layers[1].shared.output
        model.layers[2].shared.input[:] = 9
        return before, positions, model.layers[2].shared.output, model.layers[2].output[0]

    before, positions, edited, last = run_one(block).value
    assert torch.equal(before, rows([1, 2, 3]))
    assert positions.tolist() == [0, 1, 2]
    assert edited.tolist() == [9, 9, 9]
    assert torch.equal(last, rows([6, 7, 8]))


def test_a_step_that_is_over_cannot_be_looped_over() -> None:
    def block(model: Any, tracer: Any) -> None:
        for _ in tracer.iter[1]:
            pass
        for _ in tracer.iter[0]:
            pass

    with pytest.raises(OutOfOrderError, match="step 0 is over"):
        run_one(block)


@pytest.mark.parametrize("key", [-1, slice(-2, None), [0, -1], [2, 1]])
def test_steps_count_up_from_zero(key: Any) -> None:
    def block(model: Any, tracer: Any) -> None:
        for _ in tracer.iter[key]:
            pass

    with pytest.raises(ValueError, match=r"count up|ascend"):
        run_one(block)


def test_a_split_prompt_is_an_error_of_that_request() -> None:
    import numpy as np

    from actors.worker.step import StepRows

    engine = ToyEngine()
    from actors.worker.blocks.wire import BlockCode, pack

    def block(model: Any, tracer: Any) -> None:
        for _ in tracer.all():
            model.layers[0].output  # noqa: B018

    code = BlockCode(code=None, function=block, names={}, filename="", source="")
    engine.runtime.add_request("r0", {"key": "k", "payload": pack(code).head})
    for first in (0, 2):
        engine.runtime.begin_step(
            StepRows(request_ids=("r0",), starts=np.array([0, 2]), first_positions=np.array([first]))
        )
        with torch.inference_mode():
            engine.model(torch.zeros(2, WIDTH), torch.arange(2))
        engine.runtime.end_step()
    (outcome,) = engine.runtime.finish("k", None)
    assert outcome.failure is not None
    assert isinstance(outcome.failure.error, SplitPromptError)


# -- steps -----------------------------------------------------------------------------------------------------------


def test_each_step_is_seen_once_with_one_row() -> None:
    def block(model: Any, tracer: Any) -> Any:
        return [(step, model.layers[0].output[0][:, 0].tolist()) for step in tracer.all()]

    outcome = run_one(block, n_steps=4)
    assert outcome.value == [(0, [1, 2, 3]), (1, [4]), (2, [5]), (3, [6])]
    assert outcome.steps == 4
    assert outcome.cut is None


@pytest.mark.parametrize(
    ("key", "steps"),
    [(2, [2]), (slice(1, 3), [1, 2]), ([0, 3], [0, 3]), (slice(None, None, 2), [0, 2]), (slice(None), [0, 1, 2, 3])],
    ids=str,
)
def test_loops_run_the_steps_asked_for(key: Any, steps: list[int]) -> None:
    def block(model: Any, tracer: Any) -> Any:
        return [(step, tracer.step, len(model.layers[0].output[0])) for step in tracer.iter[key]]

    assert run_one(block, n_steps=4).value == [(step, step, 3 if step == 0 else 1) for step in steps]


def test_a_loop_that_reads_nothing_still_runs_once_per_step() -> None:
    def block(model: Any, tracer: Any) -> Any:
        return list(tracer.all())

    assert run_one(block, n_steps=3).value == [0, 1, 2]


def test_a_bounded_loop_cut_short_is_reported_and_what_follows_does_not_run() -> None:
    def block(model: Any, tracer: Any) -> Any:
        seen = save([], "seen")
        for step in tracer.iter[:5]:
            seen.append(step)
        seen.append("after")
        return seen

    outcome = run_one(block, n_steps=3)
    assert outcome.saves == {"seen": [0, 1, 2]}
    assert outcome.value is None
    assert outcome.cut == (3, 3)


def test_after_a_loop_without_an_end_the_block_goes_on_to_the_result() -> None:
    def block(model: Any, tracer: Any) -> Any:
        for step in tracer.all():
            last = step
        return last, tracer.result

    assert run_one(block, n_steps=3).value == (2, "output of 0")


def test_nothing_can_be_read_after_the_result() -> None:
    def block(model: Any, tracer: Any) -> Any:
        _ = tracer.result
        return model.layers[0].output

    with pytest.raises(RequestFinishedError, match="read tracer.result last"):
        run_one(block)


def test_stop_ends_the_block_and_names_the_request() -> None:
    def block(model: Any, tracer: Any) -> Any:
        kept = save([], "kept")
        for step in tracer.all():
            kept.append(step)
            if step == 1:
                tracer.stop()
        raise AssertionError("not reached")

    request = ToyRequest(block, n_steps=9)
    (outcome,) = ToyEngine().run(request)
    assert outcome.failure is None
    assert outcome.stopped
    assert outcome.saves == {"kept": [0, 1]}
    assert len(request.seen) == 2


def test_barrier_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="do not share a forward pass"):
        run_one(lambda model, tracer: tracer.barrier(2))


# -- logits and samples ----------------------------------------------------------------------------------------------


def test_logits_and_samples_are_one_row_and_writable() -> None:
    def block(model: Any, tracer: Any) -> Any:
        shapes = []
        for step in tracer.all():
            shapes.append((tuple(model.logits.shape), tuple(model.samples.shape)))
            if step == 1:
                model.samples[:] = 9
        return shapes

    request, other = ToyRequest(block, n_prompt=5), ToyRequest(lambda model: None)
    outcome, _ = ToyEngine().run(request, other)
    assert outcome.value == [((1, VOCAB), (1, 1))] * 3
    assert request.sampled == [0, 9, 2]
    assert other.sampled == [0, 1, 2]


def test_logits_decide_what_is_drawn() -> None:
    def block(model: Any) -> None:
        logits = torch.zeros(1, VOCAB)
        logits[0, 7] = 5
        model.logits = logits
        assert model.samples.item() == 7
        model.samples = torch.tensor([[8]])

    request = ToyRequest(block)
    (outcome,) = ToyEngine().run(request)
    assert outcome.failure is None
    assert request.sampled[0] == 8


def test_logits_are_not_copied_unless_read(monkeypatch: pytest.MonkeyPatch) -> None:
    from actors.worker.blocks import visit

    read: list[str] = []
    copy = visit.Passage.copy

    def counting(passage: visit.Passage, *args: Any) -> Any:
        read.append(passage.name)
        return copy(passage, *args)

    monkeypatch.setattr(visit.Passage, "copy", counting)
    run_one(lambda model: model.layers[0].inner.output)
    assert read == ["layers.0.inner.output"]
