"""Rows belong to their request, whatever the engine does with its batches. Real vLLM, real store."""

from __future__ import annotations

import numpy as np
import pytest

from actors.selection import Selection
from tests.harness import engine, harvest, make_run

NAMES = ("residual.0", "residual.3", "mlp_out.1")
KV_BLOCK_TOKENS = 128
KV_TOKEN_BYTES = 4 * 2 * 2 * 32 * 4


@pytest.fixture(scope="module")
def locations(tiny_qwen3):
    from actors.worker.locations import resolve_locations
    from actors.worker.tree import build_model_tree

    return resolve_locations(build_model_tree(str(tiny_qwen3)), NAMES)


@pytest.fixture(scope="module")
def prompts():
    random = np.random.default_rng(7)
    lengths = [1, 2, 300, *random.integers(1, 300, 61)]
    return [random.integers(5, 1000, int(n)).tolist() for n in lengths]


@pytest.fixture(scope="module")
def alone(tiny_qwen3, locations, prompts, tmp_path_factory):
    """Every prompt by itself: one request at a time, whole prompts in a step."""
    run = make_run(tmp_path_factory.mktemp("alone") / "run", prompts, locations)
    with engine(run, tiny_qwen3, locations, vllm={"max_num_seqs": 1, "max_num_batched_tokens": 512}) as feeder:
        return harvest(run, feeder)


def assert_same(reader, reference, prompts, tolerance=1e-5):
    for invoke, prompt in enumerate(prompts):
        got, expected = reader.prompt(invoke), reference.prompt(invoke)
        assert got.token_ids.tolist() == prompt
        assert got.positions.tolist() == list(range(len(prompt)))
        for name in NAMES:
            a, b = got.rows[name].astype(np.float64), expected.rows[name].astype(np.float64)
            errors = np.linalg.norm(a - b, axis=1) / np.linalg.norm(b, axis=1)
            assert errors.max() < tolerance, (invoke, name, int(errors.argmax()), errors.max())


def test_chunked_preempted_and_mixed_requests_keep_their_rows(
    tiny_qwen3, locations, prompts, alone, tmp_path, monkeypatch
):
    # It would win over kv_cache_memory_bytes.
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE")
    # Answers grow until the KV cache is full, so that requests are preempted and computed again.
    run = make_run(tmp_path / "run", prompts, locations, n_units=4, max_tokens=150)
    vllm = {
        "max_num_batched_tokens": 64,  # long prompts are cut into five pieces
        "max_num_seqs": 8,
        # Room for a little more than the longest prompt, while eight requests run.
        "kv_cache_memory_bytes": 6 * KV_BLOCK_TOKENS * KV_TOKEN_BYTES,
    }
    sampling = {"temperature": 0.0, "ignore_eos": True}
    with engine(run, tiny_qwen3, locations, vllm=vllm, sampling=sampling, generates=True) as feeder:
        reader = harvest(run, feeder)
        stats = feeder.stats
    assert stats.n_steps > len(prompts)
    assert stats.n_recomputed > 0, "nothing was preempted: the test does not test what it says"
    assert_same(reader, alone, prompts)


@pytest.mark.parametrize("chunk", [16, 512])
def test_order_and_chunk_size_do_not_matter(tiny_qwen3, locations, prompts, alone, tmp_path, chunk):
    order = np.random.default_rng(chunk).permutation(len(prompts)).tolist()
    run = make_run(tmp_path / "run", prompts, locations, n_units=2, order=order)
    vllm = {"max_num_batched_tokens": chunk, "max_num_seqs": min(chunk, 32)}
    with engine(run, tiny_qwen3, locations, vllm=vllm) as feeder:
        assert_same(harvest(run, feeder), alone, prompts)


def test_a_second_run_on_the_same_engine_equals_the_first(tiny_qwen3, locations, prompts, tmp_path):
    prompts = prompts[:12]
    doubled = [*prompts, *prompts]
    # Two units with the same prompts, one after the other on one engine.
    order = [number // 2 + 12 * (number % 2) for number in range(24)]
    run = make_run(tmp_path / "run", doubled, locations, n_units=2, order=order)
    with engine(run, tiny_qwen3, locations) as feeder:
        reader = harvest(run, feeder)
    for invoke, prompt in enumerate(prompts):
        first, second = reader.prompt(invoke), reader.prompt(invoke + 12)
        assert first.token_ids.tolist() == second.token_ids.tolist() == prompt
        for name in NAMES:
            np.testing.assert_allclose(first.rows[name], second.rows[name], rtol=1e-4, atol=1e-4)


def test_generated_rows_hold_the_tokens_that_were_fed_back(tiny_qwen3, locations, tmp_path):
    """Different ends: `min_tokens` and end-of-sequence; an ended request has no row too many."""
    random = np.random.default_rng(3)
    prompts = [random.integers(5, 1000, 6 + index).tolist() for index in range(8)]
    limits = [2, 5, 9, 13, 20, 20, 20, 20]
    selection = Selection(source="both")
    run = make_run(tmp_path / "run", prompts, locations, selection=selection, max_tokens=limits)
    sampling = {"temperature": 1.0, "seed": 1}
    with engine(run, tiny_qwen3, locations, selection=selection, sampling=sampling, generates=True) as feeder:
        reader = harvest(run, feeder)
    sequences = []
    for invoke, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        stored = reader.prompt(invoke)
        n = len(stored.positions)
        assert stored.positions.tolist() == list(range(n))
        assert stored.token_ids[: len(prompt)].tolist() == prompt
        assert n <= len(prompt) + limit - 1
        sequences.append(stored.token_ids.tolist())
    # The same sequences as prompts give the same rows: each row belongs to the token beside it.
    again = make_run(tmp_path / "again", sequences, locations)
    with engine(again, tiny_qwen3, locations) as feeder:
        assert_same(reader, harvest(again, feeder), sequences)
