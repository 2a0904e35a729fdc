"""Rows of answers, on one real engine: eight greedy answers of up to 20 tokens that end by length and by end tokens.

The model's vocabulary is no multiple of 64, so vLLM pads its head; its generation_config.json asks for hot sampling and
names several end tokens. All expected values come from transformers.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from actors.selection import Selection
from actors.worker.locations import resolve_locations
from actors.worker.tree import build_model_tree
from harvest.model_config import read_generation_defaults
from tests.harness import engine, harvest, make_run
from tests.reference import Reference, relative_error
from tests.tiny_models import make_tiny_model

VOCABULARY = 1000
NAMES = ("residual.1", "final_norm", "logits")
LIMITS = (20, 20, 20, 5, 20, 20, 2, 20)
MIN_TOKENS = 2
EOS = 1


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model("qwen3", tmp_path_factory.mktemp("models") / "odd", vocab=VOCABULARY, seed=5)


@pytest.fixture(scope="module")
def reference(model):
    return Reference(model)


@pytest.fixture(scope="module")
def prompts():
    random = np.random.default_rng(6)
    return [random.integers(5, VOCABULARY, 4 + 3 * index).tolist() for index in range(len(LIMITS))]


@pytest.fixture(scope="module")
def ends(model, reference, prompts):
    """End tokens that stop some answers early: the ones after 3, 8 and 1 tokens of three of them."""
    unbounded = [reference.answer(prompt, max_tokens=20) for prompt in prompts[:3]]
    ends = sorted({EOS, unbounded[0][3], unbounded[1][8], unbounded[2][1]})
    settings = {"temperature": 5.0, "top_k": 50, "top_p": 0.5, "repetition_penalty": 1.5, "eos_token_id": ends}
    (model / "generation_config.json").write_text(json.dumps(settings))
    return ends


@pytest.fixture(scope="module")
def expected(reference, prompts, ends):
    return [
        reference.answer(prompt, max_tokens=limit, min_tokens=min(MIN_TOKENS, limit), ends=ends)
        for prompt, limit in zip(prompts, LIMITS, strict=True)
    ]


@pytest.fixture(scope="module")
def answers(model, prompts, ends, tmp_path_factory):
    """The store, and the engine's own outputs by invoke."""
    locations = resolve_locations(build_model_tree(str(model)), NAMES)
    selection = Selection(source="generated")
    run = make_run(tmp_path_factory.mktemp("run") / "run", prompts, locations, selection=selection, max_tokens=LIMITS)
    sampling = {"temperature": 0.0, "min_tokens": MIN_TOKENS}
    outputs = {}
    with engine(
        run, model, locations, selection=selection, sampling=sampling, generates=True, vllm={"max_num_seqs": 3}
    ) as feeder:
        step = feeder._llm.step

        def recorded():
            finished = step()
            outputs.update({int(each.request_id.rsplit(".", 1)[1]): each for each in finished})
            return finished

        setattr(feeder._llm, "step", recorded)  # noqa: B010
        reader = harvest(run, feeder)
    return reader, outputs


def test_the_stored_token_of_each_generated_row_is_the_engines_output_token(answers, prompts):
    reader, outputs = answers
    for invoke, prompt in enumerate(prompts):
        stored = reader.prompt(invoke)
        assert stored.token_ids.tolist() == list(outputs[invoke].token_ids[:-1]), invoke
        assert stored.positions.tolist() == [len(prompt) + k for k in range(len(outputs[invoke].token_ids) - 1)]


def test_requests_that_end_early_have_no_extra_row(answers, expected, ends):
    reader, outputs = answers
    stopped = [invoke for invoke, output in outputs.items() if output.finish_reason == "stop"]
    assert len(stopped) >= 3, "nothing ended early: the test does not test what it says"
    assert {outputs[invoke].finish_reason for invoke in outputs} == {"stop", "length"}
    for invoke, answer in enumerate(expected):
        assert len(reader.prompt(invoke).positions) == len(answer) - 1
        if invoke in stopped:
            assert outputs[invoke].token_ids[-1] in ends
            assert len(answer) > MIN_TOKENS
    # What was planned beyond the ends is a hole in every array.
    held = reader.array("tokens/invoke", slice(0, reader.layout.n_rows))
    n_rows = sum(len(answer) - 1 for answer in expected)
    assert np.count_nonzero(held >= 0) == n_rows
    for name in NAMES:
        rows = reader.array(f"acts/{name}", slice(0, reader.layout.n_rows))
        assert np.array_equal(rows.any(axis=1), held >= 0), name


def test_sampling_settings_of_generation_config_are_not_used_and_its_ends_are_known(answers, expected, model, ends):
    _, outputs = answers
    for invoke, answer in enumerate(expected):
        assert list(outputs[invoke].token_ids) == answer
    known = read_generation_defaults(str(model), revision=None)
    assert list(known.end_token_ids) == ends
    assert known.unused == {"temperature": 5.0, "top_p": 0.5, "top_k": 50, "repetition_penalty": 1.5}


def test_rows_of_answers_are_those_of_the_same_sequences_as_prompts(answers, expected, prompts, reference):
    reader, _ = answers
    for invoke, (prompt, answer) in enumerate(zip(prompts, expected, strict=True)):
        stored = reader.prompt(invoke)
        wanted = reference.rows([*prompt, *answer])
        for name in NAMES:
            assert relative_error(stored.rows[name], wanted[name][stored.positions]) < 1e-5, (invoke, name)


def test_the_padding_of_the_vocabulary_never_shows(answers):
    reader, _ = answers
    assert reader.prompt(0).rows["logits"].shape[1] == VOCABULARY
    assert np.isfinite(reader.prompt(0).rows["logits"]).all()
