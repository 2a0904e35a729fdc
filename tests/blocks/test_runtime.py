"""What a block may do at a location, on a toy model: exact values, no engine."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from actors.worker.blocks.errors import (
    BadWriteError,
    BadWriteTypeError,
    BlockTimeoutError,
    LocationError,
    LocationNotReachedError,
    OutOfOrderError,
    RequestFinishedError,
    SplitPromptError,
)
from harvest import save
from tests.blocks.toy import VOCAB, WIDTH, ToyEngine, ToyModel, ToyRequest, run_one


def rows(values: list[float]) -> torch.Tensor:
    """Rows whose columns are all alike."""
    return torch.tensor(values)[:, None].expand(-1, WIDTH)


# -- reading -------------------------------------------------------------------------------------------------------


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


# -- writing -------------------------------------------------------------------------------------------------------


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


# -- order ---------------------------------------------------------------------------------------------------------


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
        model.layers[0].shared.output  # noqa: B018
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


# -- steps ---------------------------------------------------------------------------------------------------------


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


# -- logits and samples --------------------------------------------------------------------------------------------


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


# -- failing -------------------------------------------------------------------------------------------------------


def test_an_error_names_file_line_and_location_and_leaves_the_others() -> None:
    def block(model: Any, tracer: Any) -> None:
        for step in tracer.all():
            model.layers[1].output  # noqa: B018
            if step == 1:
                raise KeyError("broken")

    bad, good = ToyRequest(block, n_steps=6), ToyRequest(lambda model, tracer: list(tracer.all()), n_steps=4)
    failed, fine = ToyEngine().run(bad, good)
    failure = failed.failure
    assert failure is not None
    assert isinstance(failure.error, KeyError)
    assert failure.file == __file__
    assert failure.text == 'raise KeyError("broken")'
    assert (failure.location, failure.step) == ("layers.1.output", 1)
    assert len(bad.seen) == 2
    assert fine.value == [0, 1, 2, 3]


def test_edits_before_an_error_in_the_same_visit_do_not_land() -> None:
    def block(model: Any) -> None:
        model.layers[0].inner.output[:] = 99
        raise ValueError

    request = ToyRequest(block)
    ToyEngine().run(request)
    assert torch.equal(request.seen[0], rows([6, 7, 8]))


def test_leaving_the_process_is_an_error_of_the_request() -> None:
    def block(model: Any) -> None:
        raise SystemExit(3)

    (outcome,) = ToyEngine().run(ToyRequest(block))
    assert outcome.failure is not None
    assert isinstance(outcome.failure.error, SystemExit)


def test_interrupting_reaches_the_caller() -> None:
    def block(model: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ToyEngine().run(ToyRequest(block))
    assert not torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled()


def test_a_block_that_runs_away_is_stopped() -> None:
    def block(model: Any) -> None:
        while True:
            try:
                while True:
                    pass
            except ZeroDivisionError:
                pass

    begin = time.monotonic()
    bad, good = ToyRequest(block), ToyRequest(lambda model: model.layers[0].output[0])
    failed, fine = ToyEngine(block_time_limit_s=0.2).run(bad, good)
    assert time.monotonic() - begin < 20
    assert failed.failure is not None
    with pytest.raises(BlockTimeoutError, match=r"0.2 s"):
        raise failed.failure.error
    assert failed.failure.line is not None
    assert torch.equal(fine.value, rows([101, 102, 103]))


def test_what_cannot_travel_is_named() -> None:
    def block(model: Any) -> None:
        save((n for n in range(3)), "generator")
        save(torch.ones(2), "tensor")

    (outcome,) = ToyEngine().run(ToyRequest(block))
    assert outcome.failure is not None
    assert "generator" in str(outcome.failure.error)
    assert outcome.saves["tensor"].tolist() == [1, 1]


def test_a_saved_module_is_refused() -> None:
    (outcome,) = ToyEngine().run(ToyRequest(lambda model: model.layers[0]))
    assert outcome.failure is not None
    assert "save its value" in str(outcome.failure.error)


class NeedsTwo(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} {two}")


def test_an_error_that_cannot_be_rebuilt_keeps_its_name_and_text() -> None:
    def block(model: Any) -> None:
        raise NeedsTwo(1, 2)

    (outcome,) = ToyEngine().run(ToyRequest(block))
    assert outcome.failure is not None
    assert str(outcome.failure.error) == "NeedsTwo: 1 2"


def test_too_much_saved_is_an_error_with_the_limit() -> None:
    (outcome,) = ToyEngine().run(ToyRequest(lambda model: torch.zeros(1 << 19)))
    assert outcome.failure is not None
    assert "1,048,576 bytes" in str(outcome.failure.error)


# -- modes and leftovers -------------------------------------------------------------------------------------------


def test_grad_and_inference_modes_are_the_blocks_own() -> None:
    def block(model: Any) -> Any:
        with torch.enable_grad():
            before = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
            model.layers[0].output  # noqa: B018
            after = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        return before, after, (torch.is_grad_enabled(), torch.is_inference_mode_enabled())

    def plain(model: Any) -> Any:
        model.layers[1].output  # noqa: B018
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    first, second = ToyEngine().run(ToyRequest(block), ToyRequest(plain))
    assert first.value == ((True, False), (True, False), (False, False))
    assert second.value == (False, False)


def test_dropped_requests_unwind_their_blocks() -> None:
    log: list[str] = []

    class Spy:
        def __reduce__(self) -> Any:
            return (_get_log, ())

    _LOG.append(log)
    spy = Spy()

    def block(model: Any) -> None:
        try:
            model.layers[0].output  # noqa: B018
        finally:
            spy.append("unwound")

    from actors.worker.blocks.wire import BlockCode, pack

    engine = ToyEngine()
    code = BlockCode(code=None, function=block, names={}, filename="", source="")
    engine.runtime.add_request("r0", {"key": "k", "payload": pack(code).head})
    import numpy as np

    from actors.worker.step import StepRows

    engine.runtime.begin_step(StepRows(request_ids=("r0",), starts=np.array([0, 2]), first_positions=np.array([0])))
    engine.runtime.drop(["r0", "unknown"])
    assert log == ["unwound"]
    assert engine.runtime.n_tasks == 0


_LOG: list[list[str]] = []


def _get_log() -> list[str]:
    return _LOG[-1]


# -- operations inside a forward -----------------------------------------------------------------------------------


def test_operations_inside_a_forward_can_be_read_and_written() -> None:
    def block(model: Any, tracer: Any) -> Any:
        source = model.layers[1].source
        kept = []
        for step in tracer.iter[:2]:
            kept.append(source.torch_add_0.input)
            if step == 0:
                source.torch_add_0.output = source.torch_add_0.output * 0
            else:
                source.torch_add_0.output[:] = 1
        return kept, dir(source)

    request, other = ToyRequest(block), ToyRequest(lambda model: model.layers[1].output[0])
    outcome, untouched = ToyEngine().run(request, other)
    kept, names = outcome.value
    assert torch.equal(kept[0], rows([1, 2, 3]))
    assert names == ["self_inner_0", "self_shared_0", "torch_add_0", "torch_mul_0"]
    assert torch.equal(request.seen[0], rows([3, 3, 3]))
    assert torch.equal(request.seen[1], rows([4]))
    assert torch.equal(untouched.value, rows([103, 104, 105]))


def test_an_unknown_operation_lists_those_there_are() -> None:
    with pytest.raises(LocationError, match=r"no operation 'nothing_0'.*torch_add_0"):
        run_one(lambda model: model.layers[1].source.nothing_0.output)


def test_a_forward_prints_with_the_names_of_its_operations() -> None:
    from actors.worker.blocks.operations import SourceText

    text = str(SourceText(ToyModel().layers[0]))
    assert "torch_add_0 |     added = torch.add(changed" in text
