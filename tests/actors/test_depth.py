"""A forward that stops after the last wanted layer gives the very rows of the whole forward."""

from __future__ import annotations

import numpy as np

from actors.worker.locations import resolve_locations
from actors.worker.tree import build_model_tree
from tests.harness import engine, harvest, make_run


def test_a_shortened_model_gives_the_whole_models_rows_exactly(tiny_qwen3, tmp_path):
    random = np.random.default_rng(2)
    prompts = [random.integers(5, 1000, int(n)).tolist() for n in (1, 30, 150, 64)]
    locations = resolve_locations(build_model_tree(str(tiny_qwen3)), ["residual.0", "q.1", "residual.1"])
    stored = []
    for stop_early in (True, False):
        run = make_run(tmp_path / f"run-{stop_early}", prompts, locations)
        vllm = {"max_num_batched_tokens": 64}
        with engine(run, tiny_qwen3, locations, vllm=vllm, stop_early=stop_early) as feeder:
            stored.append(harvest(run, feeder))
            assert (feeder.stats.n_layers, feeder.stats.n_layers_run) == (4, 2 if stop_early else 4)
    for invoke in range(len(prompts)):
        short, whole = (reader.prompt(invoke) for reader in stored)
        for name in short.rows:
            np.testing.assert_array_equal(short.rows[name], whole.rows[name], err_msg=f"{invoke} {name}")
