"""A whole run on a GPU by the command line: Ray, an engine actor, the store, verify with parity."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

CONFIG = """
seed = 3
[model]
name = "{model}"
[dataset]
path = "{data}"
id_column = "id"
[tokenization]
processes = 1
[capture]
locations = ["residual.1", "mlp_out.2"]
[store]
path = "{store}"
rows_per_shard = 2048
[engine.vllm]
kv_cache_memory_bytes = 268435456
gpu_memory_utilization = 0.05
"""


def command(*arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "harvest.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=400,
        # The tests' own setting, which hides devices from actors that ask for none.
        env={name: value for name, value in os.environ.items() if name != "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_run_from_the_command_line(gpu_model, demo_text, tmp_path):
    config = tmp_path / "run.toml"
    config.write_text(CONFIG.format(model=gpu_model, data=demo_text, store=tmp_path / "run"))
    assert "complete" in command("run", config)
    report = tmp_path / "report.json"
    command("verify", tmp_path / "run", "--parity", "8", "--json", report)
    assert json.loads(report.read_text())["ok"]
