"""A model by its Hugging Face id: the run stays with the commit that it was planned with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.tiny_models import make_tiny_model
from tests.whole_runs import harvest, write_config

pytestmark = pytest.mark.ray
OLD, NEW = "a" * 40, "b" * 40


@pytest.fixture
def hub(tiny_qwen3, tmp_path, monkeypatch):
    """The hub's cache with two commits of one model; the branch `main` stands for the old one."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "TRANSFORMERS_CACHE"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "hf" / "hub" / "models--lab--tiny"
    shutil.copytree(tiny_qwen3, folder / "snapshots" / OLD)
    other = make_tiny_model("qwen3", tmp_path / "other", seed=5)
    shutil.copytree(other, folder / "snapshots" / NEW)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(OLD)
    return folder


def test_a_branch_that_moves_on_does_not_change_the_run(hub, demo_text, tmp_path):
    path = write_config(tmp_path, Path("lab/tiny"), demo_text, {"dataset.limit": 24, "store.dtype": "float32"})
    harvest("plan", path)
    run = json.loads((tmp_path / "run" / "run.json").read_text())["run"]
    assert (run["model"], run["revision"], run["model_sha256"]) == ("lab/tiny", OLD, None)
    (hub / "refs" / "main").write_text(NEW)
    harvest("run", path)
    harvest("verify", tmp_path / "run", "--parity", 4, "--json", tmp_path / "report.json")
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["passed"]
    assert all(entry["relative_error"] < 1e-4 for entry in report["parity"]["locations"])
