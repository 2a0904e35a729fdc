"""A whole run on a GPU by the command line: Ray, an engine actor, the store, verify with parity."""

from __future__ import annotations

import json

import pytest

from tests.whole_runs import harvest, write_config

pytestmark = pytest.mark.gpu


def test_a_run_from_the_command_line(gpu_model, demo_text, tmp_path):
    vllm = {"kv_cache_memory_bytes": 1 << 28, "gpu_memory_utilization": 0.05}
    config = write_config(tmp_path, gpu_model, demo_text, {"engine.vllm": vllm, "store.rows_per_shard": 2048})
    assert "complete" in harvest("run", config).stdout
    report = tmp_path / "report.json"
    harvest("verify", tmp_path / "run", "--parity", 8, "--json", report)
    assert json.loads(report.read_text())["passed"]
