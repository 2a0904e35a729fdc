"""Fingerprints of models: what changes them, what does not, and where they are checked."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.model_files import ModelChanged, check_model, fingerprint_model
from harvest.errors import RunError
from tests.chaos.drive import drive, make_config, make_scripted_run, make_spec


@pytest.fixture
def model(tiny_qwen3, tmp_path):
    return Path(shutil.copytree(tiny_qwen3, tmp_path / "model"))


def edit_tensor(folder: Path, name: str) -> None:
    [file] = folder.glob("*.safetensors")
    tensors = load_file(file)
    # What the least of edits does: a rank-one change of one matrix.
    tensors[name] += 1e-3 * torch.outer(torch.randn(tensors[name].shape[0]), torch.randn(tensors[name].shape[1]))
    save_file(tensors, file, metadata={"format": "pt"})


def test_copies_and_touched_files_are_the_same_model(tiny_qwen3, model):
    known = fingerprint_model(str(tiny_qwen3))
    for path in model.iterdir():
        os.utime(path, (0, 0))
    (model / "README.md").write_text("words")
    (model / "optimizer.pt").write_bytes(b"x" * 100)
    assert fingerprint_model(str(model)) == known
    check_model(str(model), known)
    check_model(str(model), None)


@pytest.mark.parametrize("name", ["model.layers.2.mlp.down_proj.weight", "model.embed_tokens.weight"])
def test_one_edited_matrix_is_another_model(model, name):
    known = fingerprint_model(str(model))
    edit_tensor(model, name)
    with pytest.raises(ModelChanged, match=r"its files are others on .*Bring the old files back"):
        check_model(str(model), known)


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "config.json").write_text(
            json.dumps({**json.loads((folder / "config.json").read_text()), "rope_theta": 5e5})
        ),
        lambda folder: (folder / "modeling_own.py").write_text("x = 1"),
        lambda folder: (folder / "model-00002.safetensors").write_bytes(b"\0" * 64),
        lambda folder: next(folder.glob("*.safetensors")).unlink(),
    ],
    ids=["config", "code", "more weights", "fewer weights"],
)
def test_other_files_are_another_model(model, change):
    known = fingerprint_model(str(model))
    change(model)
    assert fingerprint_model(str(model)) != known


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".gguf"])
def test_weights_of_other_kinds_count_too(tmp_path, suffix):
    weights = tmp_path / f"weights{suffix}"
    weights.write_bytes(os.urandom(3 << 20))
    known = fingerprint_model(str(tmp_path))
    assert fingerprint_model(str(weights)) is not None
    weights.write_bytes(os.urandom(3 << 20))
    assert fingerprint_model(str(tmp_path)) != known


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 4, b"\xff" * 64, b"\x02" + b"\0" * 7 + b"[]", b"\x02" + b"\0" * 7 + b"{}"]
)
def test_damaged_weights_have_a_fingerprint(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    assert fingerprint_model(str(tmp_path)) is not None


def test_an_id_has_none_and_a_model_that_is_gone_is_told():
    assert fingerprint_model("some/model") is None
    with pytest.raises(ModelChanged, match="it is not there on"):
        check_model("/no/such/model", "0" * 64)


@pytest.mark.ray
def test_an_engine_refuses_another_model_at_its_own_place(ray_cluster, model, tmp_path):
    run = make_scripted_run(tmp_path / "run", n_units=2)
    spec = replace(make_spec(run), model=str(model), model_sha256=fingerprint_model(str(model)))
    assert drive(run, make_config(run, engines=1), spec)
    again = make_scripted_run(tmp_path / "again", n_units=2)
    edit_tensor(model, "model.layers.0.mlp.up_proj.weight")
    spec = replace(spec, run_path=str(again.path.resolve()), layout=again.layout)
    with pytest.raises(RunError, match="is not the one that the run was planned for"):
        drive(again, make_config(again, engines=1, engine_restarts=1), spec)
