"""Damage to a local model folder is named before any engine starts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harvest.errors import ModelError
from harvest.models import resolve_model
from harvest.weight_files import check_model_folder


@pytest.fixture
def folder(tiny_llama: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model that the test may damage."""
    return shutil.copytree(tiny_llama, tmp_path / "model")


@pytest.fixture
def sharded(tiny_llama: Path, tmp_path: Path) -> Path:
    """The tiny model in several weight files with an index."""
    from transformers import AutoModelForCausalLM

    path = tmp_path / "sharded"
    AutoModelForCausalLM.from_pretrained(tiny_llama).save_pretrained(path, max_shard_size="1MB")
    return path


def _cut(path: Path, n_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:n_bytes])


def test_whole_folders_pass(folder: Path, sharded: Path, smollm2: Path) -> None:
    assert len(list(sharded.glob("*.safetensors"))) > 1
    for path in (folder, sharded, smollm2):
        check_model_folder(path)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda weights: _cut(weights, weights.stat().st_size - 1), "bytes where its header promises"),
        (lambda weights: _cut(weights, 100), "its header should have"),
        (lambda weights: _cut(weights, 0), "it has 0 bytes"),
        (lambda weights: weights.write_bytes(weights.read_bytes() + b"x"), "bytes where its header promises"),
        (lambda weights: weights.write_bytes(b"\x05" + bytes(7) + b"hello"), "its header cannot be read"),
        (lambda weights: weights.write_bytes(b"\x02" + bytes(7) + b"[]"), "its header cannot be read"),
        (lambda weights: weights.write_bytes(b"version https://git-lfs.github.com/spec/v1\n"), "git lfs pull"),
        (lambda weights: weights.unlink(), "holds no weights"),
        (lambda weights: (weights.parent / "config.json").unlink(), "no config.json"),
        (lambda weights: (weights.parent / "config.json").write_text("{"), "cannot be read"),
        (lambda weights: (weights.parent / "tokenizer.json").write_bytes(b"\xff"), "cannot be read"),
    ],
)
def test_damage_is_named(folder: Path, damage: Callable[[Path], object], says: str) -> None:
    damage(folder / "model.safetensors")
    with pytest.raises(ModelError, match=says) as caught:
        check_model_folder(folder)
    assert str(folder) in str(caught.value)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1, exclude_max=True))
def test_any_cut_is_noticed(folder: Path, tiny_llama: Path, share: float) -> None:
    whole = (tiny_llama / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged"):
        check_model_folder(folder)


def test_missing_shard_is_named(sharded: Path) -> None:
    lost = sorted(sharded.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(ModelError, match=lost.name):
        check_model_folder(sharded)


def test_cut_shard_is_named(sharded: Path) -> None:
    cut = sorted(sharded.glob("*.safetensors"))[-1]
    _cut(cut, cut.stat().st_size - 4)
    with pytest.raises(ModelError, match=cut.name):
        check_model_folder(sharded)


def test_shard_of_another_model_is_named(sharded: Path) -> None:
    first, second = sorted(sharded.glob("*.safetensors"))[:2]
    shutil.copy(first, second)
    with pytest.raises(ModelError, match=f"{second.name} is damaged: it lacks"):
        check_model_folder(sharded)


def test_index_without_map(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}}))
    with pytest.raises(ModelError, match="has no weight_map"):
        check_model_folder(sharded)


def test_torch_files(folder: Path) -> None:
    import torch

    (folder / "model.safetensors").unlink()
    weights = folder / "pytorch_model.bin"
    torch.save({"a": torch.ones(1000)}, weights)
    check_model_folder(folder)
    _cut(weights, weights.stat().st_size - 10)
    with pytest.raises(ModelError, match=r"pytorch_model\.bin is damaged"):
        check_model_folder(folder)


def test_dummy_weights_need_no_files(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(ModelError, match="holds no weights"):
        check_model_folder(folder)
    check_model_folder(folder, needs_weights=False)
    assert resolve_model(str(folder), needs_weights=False) == str(folder)
