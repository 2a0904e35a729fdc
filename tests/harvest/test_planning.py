"""Bad input ends in planning, with an error that names it, or as a listed record; no engine starts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from harvest.config import RunConfig, parse_config
from harvest.errors import ConfigError, DatasetError, HarvestError, PlanError
from harvest.runs import open_or_plan, run
from storage.errors import StorageError
from storage.run_folder import RunFolder
from tests.tiny_models import make_tiny_model


def config_of(folder: Path | str, data: Path, store: Path, **changes: object) -> RunConfig:
    return parse_config(
        {
            "model": {"name": str(folder)},
            "dataset": {"path": str(data), "id_column": "id"},
            "tokenization": {"processes": 1},
            "capture": {"locations": ["residual.1"]},
            "store": {"path": str(store)},
            **changes,
        }
    )


@pytest.fixture
def messy(tmp_path):
    """Usable records 0 and 6; the others each bad in a way of their own."""
    path = tmp_path / "messy.jsonl"
    long_text = "the " * 2000
    lines = [
        json.dumps({"id": "a", "text": "An object's type determines the operations that it supports."}).encode(),
        json.dumps({"id": "b", "text": ""}).encode(),
        json.dumps({"id": "c", "text": None}).encode(),
        json.dumps({"id": "d", "text": 7}).encode(),
        b'{"id": "e", "text": "\\ud800 alone"}',
        b'{"id": "f", "text": "\xff\xfe"}',
        json.dumps({"id": "g", "text": "Every object has an identity, a type and a value."}).encode(),
        json.dumps({"id": "h", "text": long_text}).encode(),
    ]
    path.write_bytes(b"\n".join(lines))
    return path


def test_bad_records_are_listed_and_the_rest_is_planned(tiny_qwen3, messy, tmp_path):
    config = config_of(
        tiny_qwen3,
        messy,
        tmp_path / "run",
        tokenization={"overlong": "skip", "processes": 1},
        model={"name": str(tiny_qwen3), "max_length": 128},
    )
    planned = open_or_plan(config)
    assert (planned.n_invokes, planned.n_skipped) == (2, 6)
    skipped = RunFolder.open(planned.path).plan.skipped().to_pylist()
    assert {row["invoke"]: row["reason"] for row in skipped} == {
        1: "empty",
        2: "null",
        3: "not_text",
        4: "undecodable",
        5: "undecodable",
        7: "overlong",
    }
    # The same dataset under the same configuration is the same run; changed bytes are not.
    assert not open_or_plan(config).new
    messy.write_bytes(messy.read_bytes() + b'\n{"id": "z", "text": "one more"}')
    with pytest.raises(PlanError, match="its bytes have changed"):
        open_or_plan(config)


def test_an_unknown_location_suggests_close_names(tiny_qwen3, demo_text, tmp_path):
    config = config_of(tiny_qwen3, demo_text, tmp_path / "run", capture={"locations": ["residul.1"]})
    with pytest.raises(HarvestError, match="residual"):
        open_or_plan(config)
    assert not (tmp_path / "run" / "run.json").exists()


def test_logits_of_rows_that_are_not_sampled_are_refused(tiny_qwen3, demo_text, tmp_path):
    config = config_of(tiny_qwen3, demo_text, tmp_path / "run", capture={"locations": ["logits"]})
    with pytest.raises(ConfigError, match=r"logits, which exist only where a token is sampled"):
        open_or_plan(config)


def test_a_disk_too_small_for_the_prediction_is_refused(tiny_qwen3, demo_text, tmp_path):
    config = config_of(tiny_qwen3, demo_text, tmp_path / "run", limits={"disk_reserve_bytes": 10**18})
    with pytest.raises(PlanError, match="would store .* bytes, but the disk of .* has"):
        open_or_plan(config)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"dataset": {"path": "absent.jsonl"}}, DatasetError, "absent.jsonl"),
        ({"dataset": {"path": "{data}", "text_column": "txt"}}, DatasetError, "text"),
        ({"model": {"name": "no-such-model-anywhere"}}, HarvestError, "no-such-model-anywhere"),
        ({"engine": {"vllm": {"enable_prefix_caching": True}}}, ConfigError, "enable_prefix_caching"),
        ({"engine": {"vllm": {"speculative_config": {"method": "ngram"}}}}, ConfigError, "speculative_config"),
        ({"engine": {"vllm": {"enable_dbo": True}}}, ConfigError, "enable_dbo"),
        ({"engine": {"vllm": {"pipeline_parallel_size": 2}}}, ConfigError, "pipeline"),
        ({"engine": {"vllm": {"dtype": "float16"}}}, ConfigError, "model.dtype"),
    ],
)
def test_bad_settings_are_named(tiny_qwen3, demo_text, tmp_path, changes, error, message):
    if "{data}" in str(changes):
        changes = {"dataset": {**changes["dataset"], "path": str(demo_text)}}
    with pytest.raises(error, match=message):
        open_or_plan(config_of(tiny_qwen3, demo_text, tmp_path / "run", **changes))


def test_damaged_and_missing_weights_are_named(tiny_llama, demo_text, tmp_path):
    import shutil

    broken = tmp_path / "model"
    shutil.copytree(tiny_llama, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(HarvestError, match=r"model.safetensors"):
        open_or_plan(config_of(broken, demo_text, tmp_path / "run"))
    weights.unlink()
    with pytest.raises(HarvestError, match=r"safetensors|weight"):
        open_or_plan(config_of(broken, demo_text, tmp_path / "run"))


def test_a_path_that_cannot_be_a_run_folder_is_named(tiny_llama, demo_text, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StorageError, match="file"):
        open_or_plan(config_of(tiny_llama, demo_text, tmp_path / "file"))
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "thesis.tex").write_text("precious")
    with pytest.raises(StorageError, match="not empty and not a run"):
        open_or_plan(config_of(tiny_llama, demo_text, tmp_path / "used"))
    assert (tmp_path / "used" / "thesis.tex").read_text() == "precious"


def test_a_run_does_not_go_on_with_weights_that_were_overwritten(tiny_qwen3, demo_text, tmp_path):
    """As when a trainer writes its next checkpoint to the same folder. No engine starts."""
    model = tmp_path / "model"
    shutil.copytree(tiny_qwen3, model)
    config = config_of(model, demo_text, tmp_path / "run")
    assert open_or_plan(config).new
    make_tiny_model("qwen3", tmp_path / "next", seed=5)
    shutil.copytree(tmp_path / "next", model, dirs_exist_ok=True)
    with pytest.raises(PlanError, match="is not the one that the run was planned for: its files are others"):
        run(config)
