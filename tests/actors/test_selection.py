"""`Selection` against a plain-Python model, and its promises about order, stability and early ends."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.selection import Selection, SelectionError

PROMPT = st.lists(st.integers(0, 5), min_size=1, max_size=20)


@st.composite
def selections(draw: st.DrawFn) -> Selection:
    select = draw(st.sampled_from(["all", "last", "slice", "every", "sample"]))
    fields: dict[str, Any] = {"select": select, "exact_length": True}
    if select == "slice":
        bound = st.none() | st.integers(-25, 25)
        fields["start"] = draw(bound)
        fields["stop"] = draw(st.integers(-25, 25) if fields["start"] is None else bound)
    elif select == "every":
        fields["every"] = draw(st.integers(1, 7))
    elif select == "sample":
        fields["sample"] = draw(st.integers(1, 12))
    return Selection(
        source=draw(st.sampled_from(["prompt", "generated", "both"])),
        skip_first=draw(st.integers(0, 6)),
        special_ids=tuple(draw(st.sets(st.integers(0, 5), max_size=3))),
        seed=draw(st.integers(0, 2**64)),
        **fields,
    )


def model_candidates(selection: Selection, prompt: list[int], max_tokens: int) -> list[int]:
    """Candidate positions, written as one reads the documentation."""
    fed = [*prompt, *[-1] * (max_tokens - 1)]
    wanted = []
    for position, token in enumerate(fed):
        is_prompt = position < len(prompt)
        if selection.source == "prompt" and not is_prompt:
            continue
        if selection.source == "generated" and is_prompt:
            continue
        if position < selection.skip_first or (is_prompt and token in selection.special_ids):
            continue
        wanted.append(position)
    return wanted


@given(selections(), PROMPT, st.integers(1, 9), st.integers(0, 2**62))
def test_positions_agree_with_a_plain_model(
    selection: Selection, prompt: list[int], max_tokens: int, invoke: int
) -> None:
    found = selection.positions(n_prompt_tokens=len(prompt), max_tokens=max_tokens, invoke=invoke, token_ids=prompt)
    candidates = model_candidates(selection, prompt, max_tokens)
    assert found.dtype == np.int64
    if selection.select == "sample":
        assert selection.sample is not None
        assert len(found) == min(selection.sample, len(candidates))
        assert set(found.tolist()) <= set(candidates)
        assert found.tolist() == sorted(set(found.tolist()))
    else:
        expected = {
            "all": candidates,
            "last": candidates[-1:],
            "slice": candidates[selection.start : selection.stop],
            "every": candidates[:: selection.every],
        }
        assert found.tolist() == expected[selection.select]
    assert selection.count(n_prompt_tokens=len(prompt), max_tokens=max_tokens, token_ids=prompt) == len(found)


@given(selections(), st.lists(PROMPT, min_size=1, max_size=5), st.integers(1, 9))
def test_counts_of_many_invokes_are_those_of_each(selection: Selection, prompts: list[list[int]], most: int) -> None:
    lengths = np.array([len(prompt) for prompt in prompts])
    n_dropped = [selection.count_dropped(len(prompt), prompt) for prompt in prompts]
    expected = [
        len(selection.positions(n_prompt_tokens=len(p), max_tokens=most, invoke=i, token_ids=p))
        for i, p in enumerate(prompts)
    ]
    assert selection.counts(lengths, most, n_dropped).tolist() == expected
    assert selection.counts(lengths, np.full(len(prompts), most), n_dropped).tolist() == expected


@given(selections(), PROMPT, st.integers(2, 9), st.data())
def test_an_answer_that_ends_early_has_a_prefix_of_the_planned_positions(
    selection: Selection, prompt: list[int], max_tokens: int, data: st.DataObject
) -> None:
    n = data.draw(st.integers(1, max_tokens))
    planned = selection.positions(n_prompt_tokens=len(prompt), max_tokens=max_tokens, invoke=3, token_ids=prompt)
    reached = planned[planned < len(prompt) + n - 1]
    assert reached.tolist() == planned[: len(reached)].tolist()


@given(selections())
def test_json_round_trip(selection: Selection) -> None:
    assert Selection.from_json(json.loads(json.dumps(selection.to_json()))) == selection


def test_a_sample_is_the_same_for_ever() -> None:
    selection = Selection(select="sample", sample=5, seed=7)
    first = selection.positions(n_prompt_tokens=100, max_tokens=1, invoke=11)
    assert first.tolist() == SAMPLE_OF_INVOKE_11
    other = selection.positions(n_prompt_tokens=100, max_tokens=1, invoke=12)
    assert other.tolist() != first.tolist()
    reseeded = Selection(select="sample", sample=5, seed=8).positions(n_prompt_tokens=100, max_tokens=1, invoke=11)
    assert reseeded.tolist() != first.tolist()


def test_samples_are_uniform() -> None:
    selection = Selection(select="sample", sample=3)
    hits = np.zeros(10, np.int64)
    for invoke in range(3000):
        hits[selection.positions(n_prompt_tokens=10, max_tokens=1, invoke=invoke)] += 1
    # 3000 invokes take 3 of 10: each position 900 times on average, with a standard deviation of 25.
    assert hits.sum() == 9000
    assert (np.abs(hits - 900) < 130).all()


@pytest.mark.parametrize(
    "fields",
    [
        {"select": "last", "source": "generated"},
        {"select": "last", "source": "both"},
        {"select": "slice", "start": -5, "source": "generated"},
        {"select": "slice", "stop": -1, "source": "both"},
    ],
)
def test_rows_placed_by_where_an_answer_ends_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(SelectionError, match="ignore_eos"):
        Selection(**fields)
    Selection(**fields, exact_length=True)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"select": "slice"}, "needs start or stop"),
        ({"select": "all", "start": 1}, "belong to select"),
        ({"select": "all", "every": 2}, "every = 2"),
        ({"select": "every", "every": 0}, "at least 1"),
        ({"select": "sample"}, "needs sample"),
        ({"select": "last", "sample": 3}, "sample belongs"),
        ({"skip_first": -1}, "negative"),
        ({"select": "some"}, "known: all"),
        ({"source": "none"}, "known: prompt"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(SelectionError, match=words):
        Selection(**fields)


def test_special_tokens_need_the_prompts_ids() -> None:
    selection = Selection(special_ids=(1,))
    with pytest.raises(ValueError, match="token ids"):
        selection.positions(n_prompt_tokens=3, max_tokens=1, invoke=0)
    with pytest.raises(ValueError, match="2 token ids for a prompt of 3"):
        selection.positions(n_prompt_tokens=3, max_tokens=1, invoke=0, token_ids=[1, 2])


def test_generated_rows_stop_before_the_last_token() -> None:
    selection = Selection(source="both")
    assert selection.positions(n_prompt_tokens=2, max_tokens=3, invoke=0).tolist() == [0, 1, 2, 3]
    assert selection.positions(n_prompt_tokens=2, max_tokens=1, invoke=0).tolist() == [0, 1]
    assert Selection(source="generated").positions(n_prompt_tokens=2, max_tokens=1, invoke=0).tolist() == []


SAMPLE_OF_INVOKE_11 = [2, 29, 65, 66, 80]
