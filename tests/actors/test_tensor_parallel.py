"""A harvest over two tensor-parallel ranks stores what one rank stores, each location once."""

from __future__ import annotations

import numpy as np

from actors.worker.locations import resolve_locations
from actors.worker.tree import build_model_tree
from tests.harness import engine, harvest, make_run

NAMES = ("residual.1", "mlp_out.2", "q.0", "k.3", "v.3", "heads.1", "neurons.2")


def test_two_ranks_store_what_one_rank_stores(tiny_qwen3, tmp_path, monkeypatch):
    random = np.random.default_rng(5)
    prompts = [random.integers(5, 1000, int(n)).tolist() for n in random.integers(1, 90, 10)]
    locations = resolve_locations(build_model_tree(str(tiny_qwen3)), NAMES)
    stored = []
    for tp in (1, 2):
        run = make_run(tmp_path / f"tp{tp}", prompts, locations, n_units=2)
        if tp == 2:
            monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
            monkeypatch.setenv("OMP_NUM_THREADS", "1")
        vllm = {"max_num_batched_tokens": 128}
        with engine(run, tiny_qwen3, locations, tensor_parallel_size=tp, vllm=vllm) as feeder:
            stored.append(harvest(run, feeder))
    for invoke, prompt in enumerate(prompts):
        one, two = (reader.prompt(invoke) for reader in stored)
        assert one.token_ids.tolist() == two.token_ids.tolist() == prompt
        for name in NAMES:
            error = np.linalg.norm(one.rows[name] - two.rows[name]) / np.linalg.norm(one.rows[name])
            assert error < 1e-5, (invoke, name, error)
