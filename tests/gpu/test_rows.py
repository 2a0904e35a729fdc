"""Rows on a GPU: the V2 runner, compiled and graph-captured, with chunks, preemption and hostile neighbours.

The model computes in bfloat16, so rows differ from the float32 reference by rounding (a few per mille a layer). A row
of another request, position, layer or location is off by about 1.4 times its norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.gpu.rows_program import Harvested, Settings, harvest_in_process

pytestmark = pytest.mark.gpu
TOLERANCE = 6e-2
PER_LAYER = ("residual_pre", "residual_mid", "residual", "attn_in", "attn_out", "mlp_in", "mlp_out", "neurons")
KERNEL = ("q", "k", "v", "heads")
ALL = ["embed", "final_norm", *(f"{name}.*" for name in (*PER_LAYER, *KERNEL))]
EAGER = {"vllm": {"enforce_eager": True}}


def errors(rows: Any, expected: Any) -> Any:
    """Relative error of each row."""
    return np.linalg.norm(rows - expected, axis=1) / np.maximum(np.linalg.norm(expected, axis=1), 1e-30)


def assert_rows(found: Harvested, prompts: Sequence[Sequence[int]], reference: Any) -> None:
    """Every row of every location is its own token's."""
    for invoke, prompt in enumerate(prompts):
        assert found.positions[invoke] == list(range(len(found.token_ids[invoke])))
        assert found.token_ids[invoke][: len(prompt)] == prompt
        expected = reference(found.token_ids[invoke])
        for name, rows in found.rows[invoke].items():
            worst = errors(rows, expected[name])
            assert worst.max() < TOLERANCE, (invoke, name, int(worst.argmax()), float(worst.max()))


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param({}, id="graphs"),
        pytest.param(EAGER, id="eager"),
        # Steps of at most 64 rows replay graphs for prefill too, and cut long prompts into pieces.
        pytest.param({"vllm": {"max_num_batched_tokens": 64, "max_num_seqs": 8}}, id="chunks"),
    ],
)
def test_every_alias_equals_transformers(gpu_model, prompts, reference, tmp_path, engine):
    found = harvest_in_process(Settings(model=str(gpu_model), prompts=prompts, locations=ALL, engine=engine), tmp_path)
    assert len(found.rows[0]) == 2 + 4 * (len(PER_LAYER) + len(KERNEL))
    assert_rows(found, prompts, reference)


def test_logits_are_those_of_the_last_token(gpu_model, prompts, reference, tmp_path):
    settings = Settings(model=str(gpu_model), prompts=prompts, locations=["logits"], selection={"select": "last"})
    found = harvest_in_process(settings, tmp_path)
    for invoke, prompt in enumerate(prompts):
        assert found.positions[invoke] == [len(prompt) - 1]
        assert errors(found.rows[invoke]["logits"], reference(prompt)["logits"]).max() < TOLERANCE


def test_preempted_and_hostile(gpu_model, prompts, reference, tmp_path):
    """Answers grow until the KV cache is full; meanwhile static buffers and freed memory are overwritten with NaN."""
    kv_block_bytes = 32 * 2 * 2 * 64 * 2 * 4
    engine = {
        "generates": True,
        "sampling": {"temperature": 0.0, "ignore_eos": True},
        "vllm": {
            "max_num_seqs": 8,
            "max_num_batched_tokens": 256,
            "block_size": 32,  # what CPU and GPU kernels both take
            "kv_cache_memory_bytes": 36 * kv_block_bytes,
        },
    }
    settings = Settings(
        model=str(gpu_model),
        prompts=prompts,
        locations=["residual.0", "residual.3", "mlp_out.1"],
        max_tokens=150,
        selection={"source": "both"},
        hostile=True,
        engine=engine,
    )
    found = harvest_in_process(settings, tmp_path)
    assert found.n_recomputed > 0, "nothing was preempted: the test does not test what it says"
    assert [len(ids) for ids in found.token_ids] == [len(prompt) + 149 for prompt in prompts]
    assert_rows(found, prompts, reference)


def test_stopping_early_changes_nothing(gpu_model, prompts, reference, tmp_path):
    """Bit for bit in eager, by rounding in compiled passes, whose fused kernels differ."""
    found = {
        (mode, stop): harvest_in_process(
            Settings(
                model=str(gpu_model),
                prompts=prompts,
                locations=["residual.1"],
                n_units=1,  # all requests are there before the first step, so that batches are the same
                engine={**(EAGER if mode == "eager" else {}), "stop_early": stop},
            ),
            tmp_path / f"{mode}-{stop}",
        )
        for mode in ("eager", "graphs")
        for stop in (True, False)
    }
    assert {key: value.n_layers_run for key, value in found.items()} == {
        ("eager", True): 2,
        ("eager", False): 4,
        ("graphs", True): 2,
        ("graphs", False): 4,
    }
    for invoke in range(len(prompts)):
        short, full = (found["eager", stop].rows[invoke]["residual.1"] for stop in (True, False))
        assert np.array_equal(short, full)
        short, full = (found["graphs", stop].rows[invoke]["residual.1"] for stop in (True, False))
        assert errors(short, full).max() < 2e-2
    assert_rows(found["graphs", True], prompts, reference)


def test_a_warm_compile_cache_gives_the_rows_of_its_taps(gpu_model, prompts, reference, tmp_path):
    """Taps A, again A, then B: the cache must not hand B the graph of A."""
    for number, locations in enumerate([["residual.1"], ["residual.1"], ["mlp_out.2", "residual.3"]]):
        settings = Settings(
            model=str(gpu_model),
            prompts=prompts[:8],
            locations=locations,
            engine={"stop_early": False},
            environment={"VLLM_CACHE_ROOT": str(tmp_path / "cache")},
        )
        found = harvest_in_process(settings, tmp_path / str(number))
        assert sorted(found.rows[0]) == sorted(locations)
        assert_rows(found, prompts[:8], reference)
    assert any((tmp_path / "cache").rglob("*")), "no compile cache was written: the test does not test what it says"
