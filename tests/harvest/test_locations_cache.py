"""The cache answers as the probe does, or not at all."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from actors.location_errors import UnknownLocation
from actors.locations_probe import probe_locations
from harvest import locations_cache
from harvest.locations_cache import find_locations, find_modules

NAMES = ["residual.0:2", "q.1", "model.layers.0.mlp.output"]
ANSWER = [{"name": "embed", "width": 7, "element": [0, "x"], "alias": None}]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Where answers are kept, empty."""
    monkeypatch.setenv("HARVEST_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HARVEST_LOCATIONS_CACHE", raising=False)
    return tmp_path / "cache" / "locations"


@pytest.fixture
def model(tmp_path) -> str:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return str(tmp_path / "model")


@pytest.fixture
def asked(monkeypatch) -> list[str]:
    """Models that a scripted probe was asked for."""
    calls: list[str] = []

    def probe(model, names, engine_args=None):
        calls.append(model)
        return ANSWER

    monkeypatch.setattr(locations_cache, "probe_locations", probe)
    monkeypatch.setattr(locations_cache, "describe_model", lambda model, engine_args=None: probe(model, ()))
    return calls


def test_the_cache_answers_as_the_probe_did(tiny_qwen3, folder, tmp_path, monkeypatch):
    probed = []

    def probe(*arguments):
        probed.append(probe_locations(*arguments))
        return probed[-1]

    monkeypatch.setattr(locations_cache, "probe_locations", probe)
    same = shutil.copytree(tiny_qwen3, tmp_path / "same")
    found = [find_locations(str(model), NAMES, {"tensor_parallel_size": 2}) for model in (tiny_qwen3, tiny_qwen3, same)]
    assert len(probed) == 1
    assert [each["name"] for each in probed[0]] == ["residual.0", "residual.1", "q.1", "model.layers.0.mlp.output"]
    assert found == [probed[0]] * 3
    (path,) = folder.iterdir()
    assert str(tiny_qwen3) not in path.read_text()


def test_each_question_is_asked_once(folder, model, asked):
    for _ in range(3):
        assert find_locations(model, ["embed"]) == ANSWER
        assert find_modules(model) == ANSWER
    assert len(asked) == 2


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"answer": []}', "other bytes", "other key", "not text"])
def test_a_damaged_or_foreign_file_is_written_anew(damage, folder, model, asked):
    find_locations(model, ["embed"])
    (path,) = folder.iterdir()
    whole = path.read_text()
    if damage == "other bytes":
        path.write_text(whole.replace('"width": 7', '"width": 8'))
    elif damage == "other key":
        find_locations(model, ["other"])
        (other,) = set(folder.iterdir()) - {path}
        shutil.copy(other, path)
    elif damage == "not text":
        path.write_bytes(b"\xff\x00")
    else:
        path.write_text(damage)
    asked.clear()
    for _ in range(2):
        assert find_locations(model, ["embed"]) == ANSWER
    assert len(asked) == 1
    assert path.read_text() == whole


@pytest.mark.parametrize("value", ["0", "off", "False"])
def test_the_switch(value, folder, model, asked, monkeypatch):
    monkeypatch.setenv("HARVEST_LOCATIONS_CACHE", value)
    for _ in range(2):
        find_locations(model, ["embed"])
    assert len(asked) == 2
    assert not folder.exists()


def test_hub_ids_and_remote_code_are_probed_each_time(folder, model, asked):
    for _ in range(2):
        find_locations("some/model", ["embed"])
        find_locations(model, ["embed"], {"trust_remote_code": True})
    assert len(asked) == 4
    assert not folder.exists()


def test_errors_are_not_kept(folder, model, monkeypatch):
    def refuse(*_args):
        raise UnknownLocation("no such location")

    monkeypatch.setattr(locations_cache, "probe_locations", refuse)
    for _ in range(2):
        with pytest.raises(UnknownLocation, match="no such location"):
            find_locations(model, ["nothing"])
    assert not folder.exists()


def test_a_model_that_changes_under_the_probe_is_not_kept(folder, model, monkeypatch):
    def probe(*_args):
        (Path(model) / "config.json").write_text('{"n": 1}')
        return ANSWER

    monkeypatch.setattr(locations_cache, "probe_locations", probe)
    assert find_locations(model, ["embed"]) == ANSWER
    assert not folder.exists()


def test_an_answer_that_tells_the_folder_is_not_kept(folder, model, monkeypatch):
    monkeypatch.setattr(locations_cache, "probe_locations", lambda *_args: [{"name": f"{model}/config.json"}])
    find_locations(model, ["embed"])
    assert not folder.exists()


def test_a_cache_that_cannot_be_written_costs_the_probe(folder, model, asked):
    folder.parent.write_text("a file where the folder should be")
    for _ in range(2):
        assert find_locations(model, ["embed"]) == ANSWER
    assert len(asked) == 2


def test_the_oldest_go_first_and_what_is_asked_for_stays(folder, model, asked, monkeypatch):
    monkeypatch.setattr(locations_cache, "_MAX_FILES", 3)
    find_locations(model, ["first"])
    (first,) = folder.iterdir()
    (folder / f"{'0' * 64}.json.left-by-a-killed-process").touch()
    for path in folder.iterdir():
        os.utime(path, (1, 1))
    find_locations(model, ["first"])
    for name in ("second", "third"):
        find_locations(model, [name])
    assert len(list(folder.iterdir())) == 3
    assert first.exists()
    assert all(path.suffix == ".json" for path in folder.iterdir())


_PROGRAM = """
import sys
from harvest import locations_cache

ANSWER = [{"name": f"residual.{layer}", "width": 64} for layer in range(500)]
asked = []
locations_cache.answer_key = lambda *_args: "k" * 64
locations_cache._MAX_FILES = 1
locations_cache.probe_locations = lambda *_args: asked.append(1) or ANSWER
for turn in range(300):
    assert locations_cache.find_locations("model", ["residual.*"]) == ANSWER
    if turn % 3 == 0:
        locations_cache._path("k" * 64).unlink(missing_ok=True)
print(len(asked))
"""


def test_two_processes_share_a_folder(folder):
    command = [sys.executable, "-W", "error", "-c", _PROGRAM]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for process in both:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert 0 < int(out) < 300
    assert all(json.loads(path.read_text())["answer"] for path in folder.iterdir())
