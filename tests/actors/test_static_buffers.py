"""Passes that may be graph-captured fill static buffers: the same rows as the direct path, in a real engine.

A CPU captures nothing; here its worker is told that passes of up to 64 rows may be captured, so that small passes take
that path and larger ones the direct one, in the same harvest.
"""

from __future__ import annotations

import numpy as np
import pytest

from actors.selection import Selection
from actors.worker import worker_cls
from actors.worker.locations import resolve_locations
from actors.worker.tree import build_model_tree
from tests.harness import engine, harvest, make_run

STATIC_ROWS = 64


@pytest.fixture(scope="module")
def prompts():
    random = np.random.default_rng(3)
    return [random.integers(5, 1000, int(length)).tolist() for length in [1, 200, *random.integers(1, 90, 30)]]


@pytest.mark.parametrize(
    ("names", "selection"),
    [
        pytest.param(["embed", "residual.*", "attn_in.1", "q.2", "heads.2", "final_norm"], Selection(), id="rows"),
        # More rows in a pass than the buffer has, and fewer requests in it than that.
        pytest.param(["logits", "residual.3"], Selection(select="last"), id="logits"),
        pytest.param(["residual.1"], Selection(reduce="mean"), id="reduced"),
    ],
)
def test_static_and_direct_rows_are_equal(tiny_qwen3, prompts, tmp_path, monkeypatch, names, selection):
    locations = resolve_locations(build_model_tree(str(tiny_qwen3)), names)
    readers = []
    for static_rows in (0, STATIC_ROWS):
        monkeypatch.setattr(worker_cls, "_largest_captured_rows", lambda config, n=static_rows: n)
        run = make_run(tmp_path / str(static_rows), prompts, locations, selection=selection)
        vllm = {"max_num_batched_tokens": 512, "max_num_seqs": 32}
        with engine(run, tiny_qwen3, locations, selection=selection, vllm=vllm) as feeder:
            readers.append(harvest(run, feeder))
    direct, static = readers
    for invoke in range(len(prompts)):
        one, other = direct.prompt(invoke), static.prompt(invoke)
        assert one.positions.tolist() == other.positions.tolist()
        for name, rows in one.rows.items():
            np.testing.assert_array_equal(rows, other.rows[name])
