"""Traces with one prompt on a real engine: reading, writing, stepping, prompts, stopping, failing."""

# mypy: disable-error-code="attr-defined, assignment, var-annotated, unreachable, unused-ignore"

from __future__ import annotations

from typing import Any

import pytest
import torch

from actors.worker.blocks.errors import BadWriteError, BlockTimeoutError, OutOfOrderError
from harvest import BlockError, LoopCutError, LoopCutWarning

PROMPT = "The capital of France is"
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


def tokens_of(output: Any) -> list[int]:
    return list(output.outputs[0].token_ids)


# -- logits and samples --------------------------------------------------------------------------------------------


def test_greedy_logits_name_the_token(model: Any) -> None:
    with model.trace(PROMPT, max_tokens=3, **GREEDY) as tracer:
        best = [].save()
        for _ in tracer.iter[:3]:
            best.append(model.logits.argmax(-1).item())
        out = tracer.result.save()
    assert best == tokens_of(out)


def test_assigned_logits_read_back_and_decide(model: Any) -> None:
    with model.trace(PROMPT, max_tokens=1, **GREEDY) as tracer:
        zeros = torch.zeros_like(model.logits)
        zeros[0, 321] = 1
        model.logits = zeros
        back = model.logits.save()
        token = model.samples.item().save()
        out = tracer.result.save()
    assert back.sum() == 1
    assert token == 321
    assert tokens_of(out) == [321]


def test_logits_edited_in_place_mask_a_token(model: Any) -> None:
    best = tokens_of(model.generate(PROMPT, max_tokens=1, **GREEDY)[0])[0]
    with model.trace(PROMPT, max_tokens=1, **GREEDY) as tracer:
        model.logits[:, best] = float("-inf")
        out = tracer.result.save()
    assert tokens_of(out) != [best]


def test_the_sample_is_the_argmax_at_temperature_zero(model: Any) -> None:
    with model.trace(PROMPT, max_tokens=1, **GREEDY):
        best = model.logits.argmax(-1).item().save()
        drawn = model.samples.item().save()
    assert best == drawn


def test_a_forced_sample_reads_back_and_conditions_the_rest(model: Any) -> None:
    with model.trace(PROMPT, max_tokens=4, **GREEDY) as tracer:
        model.samples[:] = 500
        back = model.samples.item().save()
        forced = tracer.result.save()
    prompt_ids = list(forced.prompt_token_ids)
    follow = model.generate({"prompt_token_ids": [*prompt_ids, 500]}, max_tokens=3, **GREEDY)[0]
    assert back == 500
    assert tokens_of(forced) == [500, *tokens_of(follow)]


def test_a_sample_outside_the_vocabulary_fails_its_request(model: Any) -> None:
    with pytest.raises(BlockError, match="vocabulary") as caught, model.trace(PROMPT, max_tokens=2, **GREEDY):
        model.samples[:] = 10**6
    assert isinstance(caught.value.__cause__, BadWriteError)
    assert caught.value.text == "model.samples[:] = 10**6"


def test_a_forced_sample_with_logprobs(model: Any) -> None:
    with model.trace(PROMPT, max_tokens=2, logprobs=3, **GREEDY) as tracer:
        model.samples[:] = 7
        out = tracer.result.save()
    assert tokens_of(out)[0] == 7


def test_temperature_changes_draws_and_seeds_repeat_them(model: Any) -> None:
    def draw(**sampling: Any) -> list[int]:
        with model.trace(PROMPT, max_tokens=8, ignore_eos=True, **sampling) as tracer:
            out = tracer.result.save()
        return tokens_of(out)

    assert draw(temperature=2.0, seed=1) == draw(temperature=2.0, seed=1)
    assert draw(temperature=2.0, seed=1) != draw(temperature=2.0, seed=2)
    assert draw(temperature=0.0) != draw(temperature=2.0, seed=1)


# -- interventions -------------------------------------------------------------------------------------------------


def test_a_read_spans_the_prompt(model: Any) -> None:
    with model.trace(PROMPT, max_tokens=1, **GREEDY) as tracer:
        rows = model.model.layers[1].mlp.output.shape.save()
        out = tracer.result.save()
    assert tuple(rows) == (len(out.prompt_token_ids), 128)


@pytest.mark.parametrize("how", ["swap", "in place", "clone and assign"])
def test_zeroing_an_output_changes_what_follows_alike(model: Any, how: str) -> None:
    with model.trace(PROMPT, max_tokens=1, **GREEDY):
        module = model.model.layers[1].mlp
        if how == "swap":
            module.output = torch.zeros_like(module.output)
        elif how == "in place":
            module.output[:] = 0
        else:
            edited = module.output.clone()
            edited[:] = 0
            module.output = edited
        seen = model.model.layers[2].input_layernorm.input.save()
        logits = model.logits.save()
    with model.trace(PROMPT, max_tokens=1, **GREEDY):
        plain = model.logits.save()
    assert seen.abs().max() == 0
    assert (logits - plain).abs().max() > 1e-3


def test_reading_and_editing_an_input(model: Any) -> None:
    with model.trace(PROMPT, max_tokens=1, **GREEDY):
        before = model.model.layers[2].mlp.down_proj.input.clone().save()
        model.model.layers[2].mlp.down_proj.input[:] = 0
        after = model.model.layers[2].mlp.output.save()
    assert before.shape[1] == 256
    assert after.abs().max() == 0


def test_an_early_edit_shows_late(model: Any) -> None:
    def last(add: float) -> Any:
        with model.trace(PROMPT, max_tokens=1, **GREEDY):
            model.model.layers[0].output[0][:] += add
            late = model.model.layers[3].output[0].save()
        return late

    assert (last(0.0) - last(2.0)).abs().max() > 1e-2


def test_an_edit_at_one_step_only(model: Any) -> None:
    def logits(step_to_edit: int) -> Any:
        with model.trace(PROMPT, max_tokens=4, **GREEDY) as tracer:
            kept = [].save()
            for step in tracer.iter[:4]:
                if step == step_to_edit:
                    model.model.layers[1].output[0][:] += 5
                kept.append(model.logits)
                model.samples[:] = 11  # the same tokens whatever the edit
        return kept

    plain, edited = logits(-1), logits(2)
    same = [torch.equal(one, other) for one, other in zip(plain, edited, strict=True)]
    assert same[:3] == [True, True, False]


def test_modules_can_be_called_logit_lens(model: Any) -> None:
    with model.trace(PROMPT, max_tokens=1, **GREEDY):
        hidden, residual = model.model.layers[3].output
        normed, _ = model.model.norm(hidden.clone(), residual.clone())
        lens = model.logits_processor(model.lm_head, normed[-1:]).save()
        logits = model.logits.save()
    assert (lens - logits).abs().max() < 1e-3


def test_what_is_kept_is_a_copy_even_when_the_engines_buffers_are_overwritten(model: Any) -> None:
    real = model.engine.module_tree()
    layer = real.model.layers[1]
    before = layer.forward

    def overwriting(*args: Any, **kwargs: Any) -> Any:
        hidden, residual = before(*args, **kwargs)
        kept = (hidden.clone(), residual.clone())
        hidden.fill_(torch.nan)
        residual.fill_(torch.nan)
        return kept

    layer.forward = overwriting
    try:
        with model.trace(PROMPT, max_tokens=3, **GREEDY) as tracer:
            kept = [].save()
            view = model.model.layers[1].output[1].save()
            for _ in tracer.iter[:3]:
                kept.append(model.model.layers[1].output[0])
                kept.append(model.model.layers[1].output[1][-1])
    finally:
        layer.forward = before
    assert len(kept) == 6
    assert all(torch.isfinite(value).all() for value in [view, *kept])


# -- steps ---------------------------------------------------------------------------------------------------------


def test_max_new_tokens_is_max_tokens(model: Any) -> None:
    with model.trace(PROMPT, max_new_tokens=3, **GREEDY) as tracer:
        out = tracer.result.save()
    assert len(tokens_of(out)) == 3
    assert len(tokens_of(model.generate(PROMPT, max_new_tokens=2, **GREEDY)[0])) == 2


def test_generate_with_with_is_a_trace(model: Any) -> None:
    with model.generate(PROMPT, max_tokens=3, **GREEDY) as tracer:
        steps = [].save()
        for step in tracer.all():
            steps.append(step)
    assert steps == [0, 1, 2]


def test_a_cut_loop_warns_here_and_raises_when_strict(model: Any) -> None:
    with (
        pytest.warns(LoopCutWarning, match="request 0 ended after 2 steps") as caught,
        model.trace(PROMPT, max_tokens=2, **GREEDY) as tracer,
    ):
        for _ in tracer.iter[:4]:
            pass
    assert caught[0].filename == __file__
    assert (tracer.results[0].steps, tracer.results[0].cut) == (2, True)
    with pytest.raises(LoopCutError), model.trace(PROMPT, max_tokens=2, strict=True, **GREEDY) as tracer:
        kept = [].save()
        for _ in tracer.iter[:4]:
            kept.append(1)
    assert kept == [1, 1]


def test_an_early_end_token_cuts_the_loop(model: Any) -> None:
    with (
        pytest.warns(LoopCutWarning),
        model.trace(PROMPT, temperature=0.0, max_tokens=6) as tracer,
    ):
        steps = [].save()
        for step in tracer.iter[:6]:
            steps.append(step)
            if step == 2:
                model.samples[:] = model.tokenizer.eos_token_id
    assert steps == [0, 1, 2]
    assert tracer.result.outputs[0].finish_reason == "stop"


# -- prompts -------------------------------------------------------------------------------------------------------


def test_every_form_of_prompt(model: Any) -> None:
    encoded = model.tokenizer(PROMPT)
    ids = list(encoded["input_ids"])
    forms = {
        "string": PROMPT,
        "ids": ids,
        "tokenizer output": encoded,
        "dict without mask": {"input_ids": ids},
        "tensors": model.tokenizer(PROMPT, return_tensors="pt"),
        "tensor": torch.tensor(ids),
        "vllm ids": {"prompt_token_ids": ids},
        "vllm text": {"prompt": PROMPT},
        "nested": [ids],
    }
    for name, form in forms.items():
        with model.trace(form, max_tokens=1, **GREEDY) as tracer:
            out = tracer.result.save()
        assert list(out.prompt_token_ids) == ids, name


def test_a_mask_selects_tokens(model: Any) -> None:
    with model.trace({"input_ids": [5, 6, 7, 8], "attention_mask": [0, 1, 1, 0]}, max_tokens=1, **GREEDY) as tracer:
        out = tracer.result.save()
    assert list(out.prompt_token_ids) == [6, 7]


@pytest.mark.parametrize(
    ("prompt", "error", "words"),
    [
        (["a", "b"], ValueError, "one prompt and got 2"),
        ([[5, 6], [7]], ValueError, "one prompt and got 2"),
        ([], ValueError, "no tokens"),
        (3, TypeError, "a string, a list of token ids"),
        ({"text": "a"}, TypeError, "input_ids or prompt_token_ids"),
        ([0.5], TypeError, "integers"),
        ({"input_ids": [1, 2], "attention_mask": [1]}, ValueError, "1 entries for 2"),
    ],
)
def test_bad_prompts(model: Any, prompt: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        model.trace(prompt)


def test_a_mistyped_argument_is_refused_with_a_hint(model: Any) -> None:
    with pytest.raises(TypeError, match="did you mean .*temperature"):
        model.trace(PROMPT, temperatur=1)
    with pytest.raises(TypeError, match="max_tokens is given twice"):
        model.trace(PROMPT, max_tokens=1, max_new_tokens=1)


def test_a_prompt_that_vllm_refuses_raises_its_error_and_spares_the_engine(model: Any) -> None:
    with pytest.raises(Exception, match="maximum context length is 512"), model.trace([5] * 600, max_tokens=1):
        pass
    assert len(model.generate(PROMPT, max_tokens=1)) == 1


def test_the_tokenizer_travels(model: Any) -> None:
    with model.trace(PROMPT, max_tokens=1, **GREEDY):
        word = model.tokenizer.decode([300]).save()
        tokenizer = model.tokenizer
        again = tokenizer.decode([300]).save()
    assert word == again == model.tokenizer.decode([300])


# -- stopping ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{}, {"min_tokens": 6}, {"ignore_eos": True}], ids=["plain", "min_tokens", "no_eos"])
def test_stop_ends_the_request_early_whatever_it_was_told(model: Any, more: dict[str, Any]) -> None:
    with model.trace(PROMPT, temperature=0.0, max_tokens=9, **more) as tracer:
        kept = [].save()
        for step in tracer.all():
            kept.append(model.samples.item())
            if step == 1:
                tracer.stop()
    assert len(kept) == 2
    assert tokens_of(tracer.result) == kept
    assert tracer.results[0].steps == 2
    assert len(model.generate(PROMPT, max_tokens=2, **GREEDY)) == 1


# -- failing -------------------------------------------------------------------------------------------------------


def test_an_error_surfaces_with_type_place_and_location(model: Any) -> None:
    with pytest.raises(BlockError) as caught, model.trace(PROMPT, max_tokens=4, **GREEDY):
        hidden = model.model.layers[1].output[0].save()
        raise LookupError("on purpose")
    error = caught.value
    assert type(error.__cause__) is LookupError
    assert error.file == __file__
    assert error.text == 'raise LookupError("on purpose")'
    assert (error.location, error.step, error.invoke) == ("model.layers.1.output", 0, 0)
    assert "LookupError" in str(error)
    assert f'{__file__}:{error.line}: "raise LookupError' in str(error)
    assert hidden.shape[1] == 128  # what was saved before is there
    assert "In the block" in error.__cause__.__notes__[0]
    assert len(model.generate(PROMPT, max_tokens=1)) == 1


def test_an_error_inside_a_loop_ends_its_request_at_once(model: Any) -> None:
    with pytest.raises(BlockError) as caught, model.trace(PROMPT, max_tokens=50, **GREEDY) as tracer:
        for step in tracer.iter[:50]:
            if step == 2:
                raise ValueError(step)
    assert caught.value.step == 2
    assert caught.value.results[0].steps == 3
    assert len(tokens_of(caught.value.results[0].output)) == 3


def test_reading_out_of_order(model: Any) -> None:
    with pytest.raises(BlockError, match="gone past model.layers.0.output") as caught, model.trace(PROMPT):
        model.model.layers[2].output.save()
        model.model.layers[0].output.save()
    assert isinstance(caught.value.__cause__, OutOfOrderError)


def test_writing_out_of_order(model: Any) -> None:
    with pytest.raises(BlockError) as caught, model.trace(PROMPT):
        late = model.model.layers[2].mlp.output
        model.model.layers[0].mlp.output = late
    assert isinstance(caught.value.__cause__, OutOfOrderError)


@pytest.mark.parametrize("kind", ["rows", "width", "dtype", "length"])
def test_writes_that_do_not_fit_fail_their_request_alone(model: Any, kind: str) -> None:
    with pytest.raises(BlockError) as caught, model.trace(max_tokens=2, **GREEDY) as tracer:
        with tracer.invoke(PROMPT):
            hidden, residual = model.model.layers[1].output
            if kind == "rows":
                model.model.layers[1].output = (hidden[:-1], residual)
            elif kind == "width":
                model.model.layers[1].output = (hidden[:, :-1], residual)
            elif kind == "dtype":
                model.model.layers[1].output = (hidden.double(), residual)
            else:
                model.model.layers[1].output = (hidden,)
        with tracer.invoke("Paris is in"):
            good = model.model.layers[3].output[0].save()
            out = tracer.result.save()
    assert isinstance(caught.value.__cause__, BadWriteError)
    assert caught.value.invoke == 0
    assert caught.value.location == "model.layers.1.output"
    assert len(good) == len(out.prompt_token_ids)
    assert len(tokens_of(out)) == 2


def test_a_value_that_cannot_travel_is_named(model: Any) -> None:
    import threading

    lock = threading.Lock()
    with pytest.raises(TypeError, match="the block reads 'lock', a lock"), model.trace(PROMPT):
        lock.acquire()


def test_a_block_that_runs_away_is_stopped(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    watchdog = model.engine._engine.model_executor.driver_worker.worker.model_runner.blocks.watchdog
    monkeypatch.setattr(watchdog, "limit_s", 0.3)
    with pytest.raises(BlockError, match="0.3 s") as caught, model.trace(PROMPT, max_tokens=3, **GREEDY):
        number = 0
        while True:
            number += 1
    assert isinstance(caught.value.__cause__, BlockTimeoutError)
    assert len(model.generate(PROMPT, max_tokens=1)) == 1


def test_an_interrupted_trace_gives_the_engine_up_and_the_next_starts_one(model: Any) -> None:
    with pytest.raises(KeyboardInterrupt), model.trace(PROMPT, max_tokens=3, **GREEDY):
        model.model.layers[1].output.save()
        raise KeyboardInterrupt
    assert not model.dispatched
    with model.trace(PROMPT, max_tokens=1, **GREEDY) as tracer:
        out = tracer.result.save()
    assert len(tokens_of(out)) == 1


def test_an_error_in_the_trace_itself_runs_nothing(model: Any) -> None:
    with pytest.raises(ZeroDivisionError), model.trace(max_tokens=1) as tracer:
        with tracer.invoke(PROMPT):
            pass
        _ = 1 / 0
    assert tracer.results == []
