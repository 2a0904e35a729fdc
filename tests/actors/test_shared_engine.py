"""One real engine, four requests at a time, two calls in different orders: each prompt has its own rows.

The expected rows come from transformers, one prompt at a time.
"""

from __future__ import annotations

import numpy as np
import pytest

from actors.worker.locations import resolve_locations
from actors.worker.tree import build_model_tree
from tests.harness import engine, harvest, make_run
from tests.reference import Reference, relative_error

NAMES = ("residual.0", "residual.2", "final_norm")
MAX_LENGTH = 512
TWINS = (3, 9, 21)


@pytest.fixture(scope="module")
def prompts():
    random = np.random.default_rng(8)
    lengths = [1, MAX_LENGTH - 1, 2, 40, 200, *random.integers(1, 150, 19)]
    prompts = [random.integers(5, 1000, int(n)).tolist() for n in lengths]
    for twin in TWINS[1:]:
        prompts[twin] = prompts[TWINS[0]]
    return prompts


@pytest.fixture(scope="module")
def reference(tiny_qwen3):
    return Reference(tiny_qwen3)


@pytest.fixture(scope="module")
def served(tiny_qwen3, prompts, tmp_path_factory):
    """Unit 0 has the prompts in order, unit 1 (invokes n and up) has them again, shuffled."""
    n = len(prompts)
    locations = resolve_locations(build_model_tree(str(tiny_qwen3)), NAMES)
    shuffled = n + np.random.default_rng(1).permutation(n)
    order = np.stack([np.arange(n), shuffled], axis=1).ravel().tolist()
    run = make_run(tmp_path_factory.mktemp("served") / "run", [*prompts, *prompts], locations, n_units=2, order=order)
    vllm = {"max_num_seqs": 4, "max_num_batched_tokens": 96}
    with engine(run, tiny_qwen3, locations, vllm=vllm, max_model_len=MAX_LENGTH) as feeder:
        reader = harvest(run, feeder)
        assert feeder.stats.n_steps < sum(map(len, prompts)) / 10, "requests were not served together"
    return reader


def test_mixed_lengths_with_refill_keep_their_rows(served, prompts, reference):
    for invoke, prompt in enumerate(prompts):
        stored = served.prompt(invoke)
        assert stored.token_ids.tolist() == prompt
        assert stored.positions.tolist() == list(range(len(prompt)))
        wanted = reference.rows(prompt)
        for name in NAMES:
            assert relative_error(stored.rows[name], wanted[name]) < 1e-4, (invoke, name)


def test_duplicate_prompts_get_equal_rows_each(served, prompts):
    first, *others = (served.prompt(twin) for twin in TWINS)
    assert len({first.row_start, *(other.row_start for other in others)}) == len(TWINS)
    for other in others:
        assert other.token_ids.tolist() == first.token_ids.tolist() == prompts[TWINS[0]]
        for name in NAMES:
            assert relative_error(other.rows[name], first.rows[name]) < 1e-5, name


def test_a_prompt_at_the_context_limit_is_whole(served, prompts, reference):
    assert len(prompts[1]) == MAX_LENGTH - 1
    stored = served.prompt(1)
    assert len(stored.positions) == MAX_LENGTH - 1
    wanted = reference.rows(prompts[1])["final_norm"]
    assert relative_error(stored.rows["final_norm"][-8:], wanted[-8:]) < 1e-4


def test_a_second_shuffled_call_equals_the_first_by_invoke(served, prompts):
    n = len(prompts)
    for invoke, prompt in enumerate(prompts):
        first, second = served.prompt(invoke), served.prompt(invoke + n)
        assert (first.unit, second.unit) == (0, 1)
        assert second.token_ids.tolist() == prompt
        for name in NAMES:
            assert relative_error(second.rows[name], first.rows[name]) < 1e-5, (invoke, name)
