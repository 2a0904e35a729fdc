"""Several requests at once on a real engine: own rows, own values, merging, settings, sequences, leftovers."""

# mypy: disable-error-code="attr-defined, assignment, var-annotated, unreachable, unused-ignore"

from __future__ import annotations

from typing import Any

import pytest
import torch

import harvest
from harvest import BlockError

PROMPTS = ["Paris is in", "The capital of Japan is", "Berlin is the capital of"]
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
SCALE = 0.0


def alone(model: Any, prompt: Any, **sampling: Any) -> Any:
    with model.trace(prompt, max_tokens=1, **{**GREEDY, **sampling}):
        value = model.model.layers[2].output[0].save()
    return value


def test_each_request_gets_the_rows_it_gets_alone(model: Any) -> None:
    with model.trace(max_tokens=1, **GREEDY) as tracer:
        for prompt in PROMPTS:
            with tracer.invoke(prompt):
                together = model.model.layers[2].output[0].save()
    for prompt, value in zip(PROMPTS, together, strict=True):
        expected = alone(model, prompt)
        assert value.shape == expected.shape
        assert (value - expected).abs().max() < 1e-4


def test_identical_prompts_do_not_collide(model: Any) -> None:
    with model.trace(max_tokens=3, **GREEDY) as tracer:
        for number in range(3):
            with tracer.invoke(PROMPTS[0]):
                model.samples[:] = 100 + number
                out = tracer.result.save()
    assert [request.outputs[0].token_ids[0] for request in out] == [100, 101, 102]


def test_an_edit_in_one_of_two_leaves_the_other_alone(model: Any) -> None:
    with model.trace(max_tokens=1, **GREEDY) as tracer:
        with tracer.invoke(PROMPTS[0]):
            clean = model.logits.save()
        with tracer.invoke(PROMPTS[0]):
            model.model.layers[1].output[0][:] = 0
            corrupted = model.logits.save()
    with model.trace(PROMPTS[0], max_tokens=1, **GREEDY):
        expected = model.logits.save()
    assert (clean - expected).abs().max() < 1e-3
    assert (corrupted - expected).abs().max() > 1e-2


def test_requests_finish_at_their_own_steps(model: Any) -> None:
    with model.trace(**GREEDY) as tracer:
        for n_steps in (1, 4, 2):
            with tracer.invoke(PROMPTS[0], max_tokens=n_steps):
                kept = [].save()
                for _ in tracer.all():
                    kept.append(len(model.model.layers[1].output[0]))
    assert [len(values) for values in kept] == [1, 4, 2]
    assert [values[1:] for values in kept] == [[], [1, 1, 1], [1]]
    assert [result.steps for result in tracer.results] == [1, 4, 2]


def test_many_more_requests_than_fit_at_once(model: Any) -> None:
    with model.trace(max_tokens=2, **GREEDY) as tracer:
        for number in range(40):
            with tracer.invoke([5 + number, 6, 7]):
                first = model.model.embed_tokens.output[0, :4].save()
    for number, value in enumerate(first):
        assert torch.equal(value, model.engine.module_tree().model.embed_tokens.weight[5 + number, :4])


def test_one_error_among_several_spares_the_rest(model: Any) -> None:
    with pytest.raises(BlockError) as caught, model.trace(max_tokens=3, **GREEDY) as tracer:
        for number in range(4):
            with tracer.invoke(PROMPTS[0]):
                kept = [number].save()
                model.model.layers[1].output.save()
                if number % 2:
                    raise ValueError(number)
                for _ in tracer.all():
                    kept.append(model.samples.item())
    error = caught.value
    assert error.invoke == 1
    assert [other.invoke for other in error.others] == [3]
    assert kept == [[0, *kept[0][1:]], [1], [2, *kept[0][1:]], [3]]
    assert len(kept[0]) == 4


# -- names ---------------------------------------------------------------------------------------------------------


def test_a_name_saved_by_one_request_is_its_value(model: Any) -> None:
    with model.trace(max_tokens=1, **GREEDY) as tracer:
        with tracer.invoke(PROMPTS[0]):
            first = model.samples.item().save()
        with tracer.invoke(PROMPTS[1]):
            second = model.samples.item().save()
    assert isinstance(first, int)
    assert isinstance(second, int)


def test_a_name_saved_by_several_is_a_list_in_order(model: Any) -> None:
    with model.trace(max_tokens=1, **GREEDY) as tracer:
        for number in (3, 1, 2):
            with tracer.invoke(PROMPTS[0]):
                kept = number.save()
    assert kept == [3, 1, 2]


def test_equal_numbers_do_not_drag_other_names_along(model: Any) -> None:
    other: Any = "before"
    with model.trace(PROMPTS[0], max_tokens=1, **GREEDY):
        other = 5
        kept = other.save()
        plain = 5
    assert kept == 5
    assert other == "before"
    assert "plain" not in locals()


def test_each_requests_own_list(model: Any) -> None:
    with model.trace(max_tokens=2, **GREEDY) as tracer:
        for number in range(2):
            with tracer.invoke(PROMPTS[number]):
                kept = [].save()
                for _ in tracer.all():
                    kept.append(number)
    assert kept == [[0, 0], [1, 1]]


def test_containers_saved_above_the_requests_merge(model: Any) -> None:
    with model.trace(max_tokens=1, **GREEDY) as tracer:
        grown = [].save()
        slots = [None, None, None].save()
        named = {}.save()
        names = set().save()
        for number, prompt in enumerate(PROMPTS):
            with tracer.invoke(prompt):
                grown.append(number)
                slots[number] = model.samples.item()
                named[prompt] = number
                names.add(number % 2)
    assert grown == [0, 1, 2]
    assert all(isinstance(slot, int) for slot in slots)
    assert named == {prompt: number for number, prompt in enumerate(PROMPTS)}
    assert names == {0, 1}


def test_variables_of_the_trace_itself_are_seen_by_its_requests(model: Any) -> None:
    factor = 2
    with model.trace(max_tokens=1, **GREEDY) as tracer:
        offset = factor + 1
        with tracer.invoke(PROMPTS[0]):
            kept = (offset + SCALE + len(PROMPTS)).save()
    assert kept == 6


def test_module_globals_and_functions_travel(model: Any) -> None:
    with model.trace(PROMPTS[0], max_tokens=1, **GREEDY):
        kept = _helper(model.model.layers[1].output[0]).save()
    assert kept.shape[1] == 128


def _helper(value: torch.Tensor) -> torch.Tensor:
    return value * SCALE


def test_a_block_does_not_change_its_callers_objects(model: Any) -> None:
    mine = [1]
    with model.trace(PROMPTS[0], max_tokens=1, **GREEDY):
        mine.append(2)
    assert mine == [1]


def test_layers_bound_outside_and_the_root_model_are_references(model: Any) -> None:
    from harvest.blocks.trace import pack_block
    from harvest.blocks.vllm import BlockCode

    layer, layers = model.model.layers[1], list(model.model.layers)

    def size(**names: Any) -> int:
        return len(pack_block(BlockCode(code=b"", function=None, names=names, filename="", source=""), model))

    assert size(model=model) - size() < 100
    assert size(layer=layer) - size() < 100
    with model.trace(PROMPTS[0], max_tokens=1, **GREEDY):
        kept = [layers[0].output[0].shape, layer.output[0].shape].save()
    assert kept[0] == kept[1]


def test_an_empty_request_is_harmless_and_one_with_work_is_refused(model: Any) -> None:
    with model.trace(max_tokens=1, **GREEDY) as tracer:
        with tracer.invoke():
            pass
        with tracer.invoke(PROMPTS[0]):
            kept = (1).save()
    assert kept == 1
    with pytest.raises(ValueError, match="without a prompt"), model.trace() as tracer:
        with tracer.invoke():
            model.model.layers[0].output.save()


def test_helpers_may_open_the_requests(model: Any) -> None:
    def ask(tracer: Any, prompt: str) -> None:
        with tracer.invoke(prompt):
            kept = len(model.model.layers[1].output[0]).save()  # noqa: F841

    with model.trace(max_tokens=1, **GREEDY) as tracer:
        for prompt in PROMPTS[:2]:
            ask(tracer, prompt)
    assert [result.saves["kept"] for result in tracer.results] == [6, 14]


# -- sampling ------------------------------------------------------------------------------------------------------


def test_a_requests_settings_win_over_the_traces(model: Any) -> None:
    with model.trace(max_tokens=5, **GREEDY) as tracer:
        with tracer.invoke(PROMPTS[0]):
            first = tracer.result.save()
        with tracer.invoke(PROMPTS[0], max_tokens=2):
            second = tracer.result.save()
        with tracer.invoke(PROMPTS[0], max_tokens=16):  # vLLM's default, given explicitly
            third = tracer.result.save()
    assert [len(out.outputs[0].token_ids) for out in (first, second, third)] == [5, 2, 16]


def test_an_explicit_default_wins_too(model: Any) -> None:
    with model.trace(temperature=0.0, max_tokens=6, ignore_eos=True) as tracer:
        with tracer.invoke(PROMPTS[0], temperature=1.0, seed=5):
            drawn = tracer.result.save()
        with tracer.invoke(PROMPTS[0]):
            greedy = tracer.result.save()
    assert drawn.outputs[0].token_ids != greedy.outputs[0].token_ids


def test_requests_keep_their_own_seeds(model: Any) -> None:
    with model.trace(temperature=1.0, max_tokens=6, ignore_eos=True) as tracer:
        for seed in (1, 2, 1):
            with tracer.invoke(PROMPTS[0], seed=seed):
                out = tracer.result.save()
    first, second, third = (request.outputs[0].token_ids for request in out)
    assert first == third != second


# -- several sequences ---------------------------------------------------------------------------------------------


def test_a_block_runs_once_per_sequence(model: Any) -> None:
    with model.trace(PROMPTS[0], n=3, temperature=1.0, seed=4, max_tokens=4, ignore_eos=True) as tracer:
        tokens = [].save()
        for _ in tracer.all():
            tokens.append(model.samples.item())
        out = tracer.result.save()
    assert tokens == [list(sequence.token_ids) for sequence in tracer.result.outputs]
    assert len({tuple(sequence) for sequence in tokens}) > 1
    assert tracer.results[0].steps == [4, 4, 4]
    assert len(out) == 3


def test_one_sequence_stays_a_value(model: Any) -> None:
    with model.trace(PROMPTS[0], n=1, max_tokens=1, **GREEDY):
        token = model.samples.item().save()
    assert isinstance(token, int)


# -- the function form ---------------------------------------------------------------------------------------------


def test_a_function_returns_and_saves(model: Any) -> None:
    def block(model: Any, tracer: Any) -> Any:
        norms = harvest.save([])
        for _ in tracer.all():
            norms.append(model.model.layers[1].output[0].norm().item())
        harvest.save(3, "number")
        harvest.save(norms[0])
        return tracer.result.outputs[0].text

    results = model.run(block, PROMPTS[:2], max_tokens=3, **GREEDY)
    assert [len(result.saves["norms"]) for result in results] == [3, 3]
    assert results[0].saves["number"] == 3
    assert results[0].saves["saved_2"] == results[0].saves["norms"][0]
    assert results[0].value == results[0].text
    assert results[0].steps == 3
    single = model.run(lambda model: model.logits.argmax(-1), PROMPTS[0], max_tokens=1, **GREEDY)
    assert single.value.item() == single.output.outputs[0].token_ids[0]
    ids = model.run(lambda model: len(model.model.layers[0].output[0]), [5, 6, 7], max_tokens=1)
    assert ids.value == 3


def test_errors_of_functions_are_raised_or_returned(model: Any) -> None:
    def block(model: Any) -> None:
        raise KeyError("broken")

    with pytest.raises(BlockError) as caught:
        model.run(block, PROMPTS, max_tokens=2)
    assert caught.value.text == 'raise KeyError("broken")'
    assert len(caught.value.others) == 2
    results = model.run(block, PROMPTS, max_tokens=2, errors="return")
    assert all(isinstance(result.error.__cause__, KeyError) for result in results)
    with pytest.raises(TypeError, match="not 3 arguments"):
        model.run(lambda one, two, three: None, PROMPTS)


def test_save_inside_a_with_body_and_outside_of_any_block(model: Any) -> None:
    with model.trace(PROMPTS[0], max_tokens=1, **GREEDY):
        kept = harvest.save(model.model.layers[1].output[0][-1])
        number = harvest.save(4)
    assert kept.shape == (128,)
    assert number == 4
    with pytest.raises(RuntimeError, match="no block here"):
        harvest.save(1)


# -- leftovers -----------------------------------------------------------------------------------------------------


def test_many_traces_leave_nothing_behind(model: Any) -> None:
    for _ in range(20):
        with model.trace(PROMPTS[0], max_tokens=2, **GREEDY):
            model.model.layers[1].output.save()
    assert model.engine.count_blocks() == [0]


def test_when_vllm_refuses_one_request_none_runs_and_none_is_left(model: Any) -> None:
    with pytest.raises(Exception, match="maximum context length"), model.trace(max_tokens=1, **GREEDY) as tracer:
        with tracer.invoke(PROMPTS[0]):
            kept = (1).save()
        with tracer.invoke([5] * 600):
            kept = (2).save()  # noqa: F841
    assert tracer.results == []
    assert model.engine.count_blocks() == [0]
    assert len(model.generate(PROMPTS[0], max_tokens=1)) == 1


def test_plain_requests_run_beside_blocks(model: Any) -> None:
    from actors.worker.blocks.engine import BlockRequest

    plain = BlockRequest(prompt=PROMPTS[0], sampling={"max_tokens": 3, **GREEDY})
    expected = model.generate(PROMPTS[0], max_tokens=3, **GREEDY)[0].outputs[0].token_ids
    runs = model.run_requests([plain, plain])
    assert [run.output.outputs[0].token_ids for run in runs] == [expected, expected]
    assert runs[0].outcomes == []
