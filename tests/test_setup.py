"""The set-up holds together: build metadata, demo text, tiny models, and the engine that everything else runs on."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from harvest.demo_text import main, make_demo_prompts, write_demo_text
from tests.engines import open_engine
from tests.tiny_models import make_tiny_model

ROOT = Path(__file__).resolve().parents[1]


def test_demo_text_is_the_same_bytes_each_time(tmp_path: Path) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "deep" / "b.jsonl"
    assert write_demo_text(first) == write_demo_text(second) >= 200
    assert first.read_bytes() == second.read_bytes()
    before = first.stat().st_mtime_ns
    write_demo_text(first)
    assert first.stat().st_mtime_ns == before
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_demo_text_is_prose_of_varied_length_with_unique_ids() -> None:
    prompts = make_demo_prompts()
    assert len({prompt.id for prompt in prompts}) == len({prompt.text for prompt in prompts}) == len(prompts)
    lengths = sorted(len(prompt.text) for prompt in prompts)
    assert lengths[0] >= 60 and lengths[-1] > 3 * lengths[len(lengths) // 2]
    for prompt in prompts:
        assert not re.search(r"::=|>>>|\n\n\n|  ", prompt.text), prompt


def test_demo_text_has_enough_tokens(smollm2: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    counts = [len(tokenizer.encode(prompt.text).ids) for prompt in make_demo_prompts()]
    assert len(counts) >= 200 and sum(counts) >= 8000


def test_demo_text_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out" / "demo.jsonl"
    assert main([str(path)]) == 0
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert f"{len(rows)} prompts" in capsys.readouterr().out
    assert all(row.keys() == {"id", "text"} for row in rows)
    assert main([]) == 2
    assert main([str(path / "below-a-file.jsonl")]) == 1
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_tiny_model_layers_matter(family: Any, request: pytest.FixtureRequest) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = request.getfixturevalue(f"tiny_{family}")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    ids = tokenizer(make_demo_prompts()[5].text, return_tensors="pt")["input_ids"]
    assert ids[0, 0] == tokenizer.bos_token_id == 0
    with torch.inference_mode():
        streams = model(ids, output_hidden_states=True).hidden_states[:-1]  # the last one is after the final norm
        changed = ids.clone()
        changed[0, 1] = (ids[0, 1] + 7) % 1024
        other = model(changed, output_hidden_states=True).hidden_states[:-1]
    for before, after in pairwise(streams):
        assert 0.1 < ((after - before).norm() / before.norm()).item() < 1
    # The context reaches a far token: what is measured at a token depends on the request it is in.
    assert ((streams[-1] - other[-1])[0, -1].norm() / streams[-1][0, -1].norm()).item() > 1e-3


def test_tiny_models_are_reproducible(tmp_path: Path, tiny_llama: Path) -> None:
    again = make_tiny_model("llama", tmp_path / "again")
    other = make_tiny_model("llama", tmp_path / "other", seed=1)
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (again / name).read_bytes() == (tiny_llama / name).read_bytes(), name
    assert (other / "model.safetensors").read_bytes() != (tiny_llama / "model.safetensors").read_bytes()


def test_tiny_tokenizer_round_trips(tiny_qwen3: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_qwen3)
    for text in ("Hello wörld 😀", "  two  spaces\n\tand a tab", "日本"):
        ids = tokenizer(text)["input_ids"]
        assert ids[0] == 0 and max(ids) < 1024
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    messages = [{"role": "user", "content": "Hi"}]
    chat = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert chat == "<|begin|><|role|>user\nHi<|turn|>\n<|role|>assistant\n"


def test_vllm_and_transformers_agree_on_both_models(smollm2: Path, tiny_qwen3: Path) -> None:
    """Both in one process, one after the other, as the suite's in-process engines are."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    for path, prompt, start in (
        (smollm2, "The capital of France is", " Paris."),
        (tiny_qwen3, make_demo_prompts()[3].text, ""),
    ):
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        inputs = tokenizer(prompt, return_tensors="pt")
        with torch.inference_mode():
            ids = model.generate(**inputs, max_new_tokens=12, min_new_tokens=12, do_sample=False)[0]
        expected = ids[inputs["input_ids"].shape[1] :].tolist()
        assert tokenizer.decode(expected).startswith(start)
        with open_engine(path) as llm:
            output = llm.generate([prompt], sampling, use_tqdm=False)[0].outputs[0]
        assert list(output.token_ids) == expected


@pytest.mark.ray
def test_ray_cluster_runs_a_task(ray_cluster: None) -> None:
    import ray

    @ray.remote(num_cpus=1)
    def versions() -> tuple[int, ...]:
        return sys.version_info[:3]

    assert ray.get(versions.remote()) == sys.version_info[:3]


def test_ci_calls_make_test() -> None:
    assert "make test" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    plan = subprocess.run(["make", "--dry-run", "test"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    positions = [plan.index(step) for step in ("ruff check", "mypy", "lint-imports", "pytest")]
    assert positions == sorted(positions)


def test_metadata_names_every_module_the_code_imports() -> None:
    """Whatever a package imports at top level or inside a function is a declared dependency."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {re.split(r"[<>=~! \[;]", line)[0].lower().replace("-", "_") for line in project["dependencies"]}
    declared.add("vllm")  # comes with the extra `cpu` or `gpu`
    modules = {"google": "google_crc32c"}
    optional = {"datasets", "zstandard", "tensorstore", "setproctitle", "fsspec", "cloudpickle"}
    imported: dict[str, Path] = {}
    for package in ("harvest", "actors", "storage"):
        for source in (ROOT / package).rglob("*.py"):
            if source.name.startswith("testing"):
                continue  # test kits that are shipped; who uses them has hypothesis and pytest
            for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                    imported[node.module.split(".")[0]] = source
                elif isinstance(node, ast.Import):
                    imported.update({alias.name.split(".")[0]: source for alias in node.names})
    ours = {"harvest", "actors", "storage", *sys.stdlib_module_names}
    unknown = {
        name: str(source.relative_to(ROOT))
        for name, source in imported.items()
        if name not in ours and modules.get(name, name).lower() not in declared | optional
    }
    assert unknown == {}
