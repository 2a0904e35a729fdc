"""torch.compile keeps the taps, and its cache never serves an artifact with other taps. Real vLLM, own processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from actors.worker.locations import resolve_locations
from actors.worker.tree import build_model_tree
from storage.reader import StoreReader
from tests.actors.compiled_program import prompts
from tests.harness import engine, harvest, make_run
from tests.reference import relative_error

pytestmark = pytest.mark.slow

# Both run all four layers; of the same shapes, so that a wrong artifact would fit.
TAPS_A = ("residual.0", "residual.3")
TAPS_B = ("mlp_out.1", "residual.3", "attn_out.2")


@pytest.fixture(scope="module")
def eager(tiny_qwen3, tmp_path_factory):
    locations = resolve_locations(build_model_tree(str(tiny_qwen3)), [*TAPS_A, *TAPS_B])
    run = make_run(tmp_path_factory.mktemp("eager") / "run", prompts(), locations)
    with engine(run, tiny_qwen3, locations, vllm={"max_num_batched_tokens": 128}) as feeder:
        return harvest(run, feeder)


def compiled(model, folder, names, number):
    path = folder / f"run-{number}"
    environment = {**os.environ, "VLLM_CACHE_ROOT": str(folder / "cache"), "VLLM_DISABLE_COMPILE_CACHE": "0"}
    command = [sys.executable, "-m", "tests.actors.compiled_program", str(model), str(path), ",".join(names)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return StoreReader(path)


def artifacts(folder):
    """Compiled graphs in the cache, by the folder that vLLM names after the hash of what they depend on."""
    return {path.parent.name for path in (folder / "cache/torch_compile_cache").rglob("rank_0_0")}


def assert_equal_rows(reader, eager, names):
    for invoke, prompt in enumerate(prompts()):
        stored, wanted = reader.prompt(invoke), eager.prompt(invoke)
        assert stored.token_ids.tolist() == prompt
        for name in names:
            assert relative_error(stored.rows[name], wanted.rows[name].astype(np.float64)) < 1e-5, (invoke, name)


def test_compiled_rows_equal_eager_rows_and_the_cache_knows_the_taps(tiny_qwen3, eager, tmp_path):
    first = compiled(tiny_qwen3, tmp_path, TAPS_A, 0)
    assert_equal_rows(first, eager, TAPS_A)
    made = artifacts(tmp_path)
    assert made, "nothing was compiled: the test does not test what it says"
    again = compiled(tiny_qwen3, tmp_path, TAPS_A, 1)
    assert_equal_rows(again, eager, TAPS_A)
    assert artifacts(tmp_path) == made, "the second start did not find the first one's artifact"
    other = compiled(tiny_qwen3, tmp_path, TAPS_B, 2)
    assert_equal_rows(other, eager, TAPS_B)
    assert artifacts(tmp_path) > made
