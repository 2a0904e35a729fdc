"""Reading and writing at a location, on a toy model: exact values, no engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from actors.worker.blocks.errors import (
    BadWriteError,
    BadWriteTypeError,
)
from tests.blocks.toy import WIDTH, ToyEngine, ToyModel, ToyRequest, rows, run_one

# -- reading ---------------------------------------------------------------------------------------------------------


def test_read_gives_own_rows() -> None:
    def block(model: Any) -> Any:
        return model.layers[0].output[0]

    first, second = ToyEngine().run(ToyRequest(block, n_prompt=2), ToyRequest(block, n_prompt=4))
    assert torch.equal(first.value, rows([1, 2]))
    assert torch.equal(second.value, rows([101, 102, 103, 104]))


def test_read_follows_the_runners_order() -> None:
    def block(model: Any) -> Any:
        return model.layers[0].output[0]

    requests = [ToyRequest(block, n_prompt=n) for n in (1, 2, 3)]
    outcomes = ToyEngine().run(*requests, order=[2, 0, 1])
    assert [outcome.value[0, 0].item() for outcome in outcomes] == [1, 101, 201]


def test_padding_behind_the_rows_is_nobodys() -> None:
    def block(model: Any, tracer: Any) -> Any:
        kept = []
        for _ in tracer.all():
            kept.append(model.layers[0].inner.output)
            model.layers[1].inner.output[:] = 3
        return kept

    requests = [ToyRequest(block, n_prompt=n, n_steps=2) for n in (2, 1, 1, 1, 1)]
    outcomes = ToyEngine().run(*requests, n_padding=3)
    for number, (request, outcome) in enumerate(zip(requests, outcomes, strict=True)):
        n = request.n_prompt
        assert torch.equal(outcome.value[0], rows([100 * number + position for position in range(n)]))
        assert torch.equal(outcome.value[1], rows([100 * number + n]))
        assert torch.equal(request.seen[1], rows([3 + 2 + 3]))


def test_many_one_row_requests_share_one_copy_and_no_memory() -> None:
    def block(model: Any, tracer: Any) -> Any:
        kept = []
        for step in tracer.iter[:2]:
            value = model.layers[1].inner.output
            if step == 1:
                value += 1000
            kept.append(value)
        return kept[1], model.layers[2].output[0]

    requests = [ToyRequest(block, n_prompt=1, n_steps=2) for _ in range(8)]
    outcomes = ToyEngine().run(*requests)
    for number, outcome in enumerate(outcomes):
        kept, later = outcome.value
        assert torch.equal(kept, rows([100 * number + 1 + 1 + 1000]))
        assert torch.equal(later, kept + 2 + 3)


def test_a_read_of_one_row_requests_edited_by_some() -> None:
    def edits(model: Any, tracer: Any) -> None:
        for _ in tracer.all():
            model.layers[0].inner.output[:] = -5

    def reads(model: Any, tracer: Any) -> None:
        for _ in tracer.all():
            value = model.layers[0].inner.output
            assert (value >= 0).all()

    requests = [ToyRequest(edits if number % 2 else reads, n_prompt=1) for number in range(8)]
    assert all(outcome.failure is None for outcome in ToyEngine().run(*requests))
    for number, request in enumerate(requests):
        expected = -5 + 6 if number % 2 else 100 * number + 6
        assert torch.equal(request.seen[0], rows([expected]))


def test_input_is_the_first_argument_and_inputs_are_all() -> None:
    def block(model: Any) -> Any:
        first = model.layers[1].input
        args, kwargs = model.layers[1].inputs
        return first, args, kwargs

    first, args, kwargs = run_one(block).value
    assert first.tolist() == [0, 1, 2]
    assert torch.equal(args[0], first)
    assert torch.equal(kwargs["hidden"], rows([1, 2, 3]))


def test_a_second_read_of_the_same_visit_is_the_same_object() -> None:
    def block(model: Any) -> bool:
        return model.layers[0].output[0] is model.layers[0].output[0]

    assert run_one(block).value is True


def test_what_is_kept_survives_the_engine_overwriting_its_buffers() -> None:
    def block(model: Any, tracer: Any) -> Any:
        kept = []
        for _ in tracer.iter[:3]:
            hidden, double = model.layers[0].output
            kept.append((hidden, double[-1], hidden[:1]))
        return kept

    model = ToyModel(reuse=True)
    for step, (hidden, last, first) in enumerate(run_one(block, model=model).value):
        expected = rows([1, 2, 3] if step == 0 else [3 + step])
        assert torch.equal(hidden, expected)
        assert torch.equal(last, 2 * expected[-1])
        assert torch.equal(first, expected[:1])


def test_a_kept_value_is_an_ordinary_tensor() -> None:
    def block(model: Any) -> Any:
        value = model.layers[0].output[0]
        assert not value.is_inference()
        with torch.enable_grad():
            weight = torch.ones(WIDTH, requires_grad=True)
            (value * weight).sum().backward()
        return weight.grad

    assert run_one(block).value[0].item() == 1 + 2 + 3


def test_weights_and_sizes_can_be_read_and_modules_called() -> None:
    def block(model: Any) -> Any:
        value = model.layers[0].output[0]
        again = model.layers[2](torch.zeros(3), value)[0]
        return model.layers[2].index, len(model.layers), again

    index, length, again = run_one(block).value
    assert (index, length) == (2, 3)
    assert torch.equal(again, rows([4, 5, 6]))


def test_modules_cannot_be_changed() -> None:
    def block(model: Any) -> None:
        model.layers[0].index = 7

    with pytest.raises(AttributeError, match="belongs to all requests"):
        run_one(block)


# -- writing ---------------------------------------------------------------------------------------------------------


def test_in_place_edits_reach_the_next_module() -> None:
    def block(model: Any) -> Any:
        model.layers[0].inner.output[-1] = 50
        return model.layers[0].output[0]

    request = ToyRequest(block)
    ToyEngine().run(request)
    assert torch.equal(request.seen[0], rows([6, 7, 56]))
    assert torch.equal(request.seen[1], rows([9]))  # a write in the block's body runs on the first step only


def test_an_edit_of_a_view_of_the_value_counts() -> None:
    def block(model: Any) -> None:
        model.layers[0].inner.output.T.mul_(0)

    request = ToyRequest(block)
    ToyEngine().run(request)
    assert torch.equal(request.seen[0], rows([6, 6, 6]))


def test_an_edit_in_inference_mode_counts() -> None:
    def block(model: Any) -> None:
        with torch.inference_mode():
            model.layers[0].inner.output.fill_(3)
            model.layers[1].input  # noqa: B018  (waits: the mode must stay with the block)

    request, other = ToyRequest(block), ToyRequest(lambda model: model.layers[2].output[0].is_inference())
    outcomes = ToyEngine().run(request, other)
    assert torch.equal(request.seen[0], rows([9, 9, 9]))
    assert outcomes[1].value is False


def test_replacements_reach_the_next_module_and_leave_the_memory_alone() -> None:
    def block(model: Any) -> Any:
        model.layers[0].inner.input = torch.zeros(3, WIDTH)
        value = model.layers[0].output[0]
        model.layers[1].inner.output = value + 10
        return value

    request = ToyRequest(block)
    (outcome,) = ToyEngine().run(request)
    assert torch.equal(outcome.value, rows([1, 1, 1]))
    assert torch.equal(request.seen[0], rows([16, 16, 16]))


def test_a_replaced_pair_and_a_replaced_named_argument() -> None:
    def block(model: Any) -> None:
        hidden, double = model.layers[0].output
        model.layers[0].output = (hidden * 0, double)
        args, kwargs = model.layers[1].inputs
        model.layers[1].inputs = (args, {**kwargs, "hidden": kwargs["hidden"] + 7})

    request = ToyRequest(block)
    ToyEngine().run(request)
    assert torch.equal(request.seen[0], rows([12, 12, 12]))


def test_reading_back_a_replacement_gives_it() -> None:
    def block(model: Any) -> bool:
        new = torch.zeros(3, WIDTH)
        model.layers[0].inner.output = new
        return model.layers[0].inner.output is new

    assert run_one(block).value is True


def test_edits_of_other_requests_stay_theirs() -> None:
    def edits(model: Any) -> None:
        hidden, double = model.layers[0].output
        model.layers[0].output = (torch.zeros_like(hidden), double)

    quiet, loud = ToyRequest(lambda model: None, n_prompt=2), ToyRequest(edits)
    ToyEngine().run(quiet, loud)
    assert torch.equal(quiet.seen[0], rows([6, 7]))
    assert torch.equal(loud.seen[0], rows([5, 5, 5]))


def test_clone_reads_loses_in_place_edits_and_keeps_assignments() -> None:
    def block(model: Any) -> None:
        value = model.layers[0].inner.output
        value[:] = 40
        later = model.layers[1].inner.output
        later[:] = 70
        model.layers[1].inner.output = later

    request = ToyRequest(block, options={"clone_reads": True})
    ToyEngine().run(request)
    assert torch.equal(request.seen[0], rows([75, 75, 75]))
    request = ToyRequest(lambda model: model.layers[0].inner.output.fill_(40), options={"clone_reads": True})
    ToyEngine().run(request)
    assert torch.equal(request.seen[0], rows([6, 7, 8]))


@pytest.mark.parametrize(
    ("new", "error", "words"),
    [
        (torch.zeros(2, WIDTH), BadWriteError, r"\[3, 6\].*own rows.*\[2, 6\]"),
        (torch.zeros(3, WIDTH + 1), BadWriteError, r"\[3, 6\].*\[3, 7\]"),
        (torch.zeros(3, WIDTH, dtype=torch.float64), BadWriteError, r"float32.*float64"),
        (0.0, BadWriteTypeError, "tensor"),
        ((torch.zeros(3, WIDTH),), BadWriteTypeError, "tensor"),
    ],
    ids=["rows", "width", "dtype", "number", "tuple"],
)
def test_a_write_that_does_not_fit_fails_its_request_alone(new: Any, error: type[Exception], words: str) -> None:
    def block(model: Any) -> None:
        model.layers[0].inner.output = new

    bad, good = ToyRequest(block), ToyRequest(lambda model: model.layers[2].output[0])
    bad_outcome, good_outcome = ToyEngine().run(bad, good)
    assert bad_outcome.failure is not None
    assert bad_outcome.failure.location == "layers.0.inner.output"
    with pytest.raises(error, match=words):
        raise bad_outcome.failure.error
    assert torch.equal(bad.seen[0], rows([6, 7, 8]))
    assert torch.equal(good_outcome.value, rows([106, 107, 108]))
    assert len(bad.seen) == 1  # it ended at once


def test_a_pair_of_the_wrong_length_is_refused() -> None:
    def block(model: Any) -> None:
        hidden, double = model.layers[0].output
        model.layers[0].output = (hidden, double, double)

    with pytest.raises(BadWriteError, match="2 parts, but 3"):
        run_one(block)


def test_a_value_resized_in_place_is_refused() -> None:
    def block(model: Any) -> None:
        model.layers[0].inner.output.resize_(1, WIDTH).zero_()
        model.layers[1].input  # noqa: B018

    with pytest.raises(BadWriteError, match="own rows"):
        run_one(block)


def test_a_value_without_rows_cannot_be_written() -> None:
    class Wide(ToyModel):
        def forward(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            self.unused(torch.zeros(41))
            return super().forward(hidden, positions)

    def block(model: Any) -> None:
        model.unused.input[:] = 1
        model.layers[0].input  # noqa: B018

    with pytest.raises(BadWriteError, match="no token rows"):
        run_one(block, model=Wide())
