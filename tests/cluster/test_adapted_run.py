"""A whole run with a LoRA adapter that writes answers, as a user gives it: plan, harvest, values, resumption."""

from __future__ import annotations

import json
import shutil

import pytest

from harvest.config import load_config
from harvest.errors import ConfigError, PlanError
from harvest.runs import open_or_plan
from storage.reader import StoreReader
from tests.adapters import make_tiny_adapter
from tests.whole_runs import harvest, write_config

pytestmark = pytest.mark.ray


def test_a_whole_run_with_an_adapter(tiny_qwen3, demo_text, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(tiny_qwen3, model)
    (model / "generation_config.json").write_text('{"temperature": 5.0, "top_k": 3, "eos_token_id": [1, 300]}')
    adapter = make_tiny_adapter(tiny_qwen3, tmp_path / "lora")
    changes = {
        "model.lora": str(adapter),
        "dataset.limit": 24,
        "capture.rows": {"source": "both"},
        "capture.generation": {"max_tokens": 6},
        "store.dtype": "float32",
    }
    path = write_config(tmp_path, model, demo_text, changes)
    said = " ".join(harvest("run", path).stdout.split())
    assert "complete" in said
    # What the model's generation_config.json changes, and what it does not, is said.
    assert "answers end at token 1, 300 too" in said
    assert "not used: temperature = 5.0, top_k = 3" in said
    # The values, with the adapter merged by hand into another implementation.
    harvest("verify", tmp_path / "run", "--parity", 8, "--json", tmp_path / "report.json")
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["passed"]
    assert all(0 < entry["relative_error"] < 1e-4 for entry in report["parity"]["locations"])
    reader = StoreReader(tmp_path / "run")
    assert any(len(reader.prompt(invoke).positions) > reader.prompt(invoke).n_prompt_tokens for invoke in range(24))
    # The adapter is content: a run goes on with the same bytes only, and never without.
    assert not open_or_plan(load_config(path)).new
    with pytest.raises(PlanError, match="model.lora was '.*', is None"):
        open_or_plan(_without_adapter(path))
    with pytest.raises(PlanError, match="engine was None, is .*quantization"):
        open_or_plan(load_config(path, ['engine.vllm.quantization="fp8_per_channel"']))
    with pytest.raises(ConfigError, match=r"model\.lora: there is no LoRA adapter"):
        open_or_plan(load_config(path, ["store.path=nowhere", "model.lora=/no/such/folder"]))
    make_tiny_adapter(tiny_qwen3, adapter, seed=1)
    with pytest.raises(PlanError, match="the LoRA adapter .* its bytes are others"):
        open_or_plan(load_config(path))


def _without_adapter(path):
    text = "\n".join(line for line in path.read_text().splitlines() if not line.startswith("lora"))
    other = path.with_name("plain.toml")
    other.write_text(text)
    return load_config(other)
