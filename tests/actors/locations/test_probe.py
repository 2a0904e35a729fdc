"""Locations asked for from a process that does not import vLLM."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from actors.location_errors import UnknownLocation
from actors.locations_probe import ProbeError, probe_locations
from harvest.inspection import print_locations
from tests.actors.locations.tiny import tiny_config


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("probe")
    tiny_config("qwen3").save_pretrained(path)
    return str(path)


@pytest.fixture(autouse=True)
def _without_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARVEST_LOCATIONS_CACHE", "0")


def test_the_module_imports_neither_vllm_nor_torch() -> None:
    code = "import sys, actors.locations_probe; sys.exit(any(m in sys.modules for m in ('vllm', 'torch', 'ray')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_names_come_back_resolved_for_the_ranks_asked_for(model: str) -> None:
    found = probe_locations(model, ["residual.0:2", "q.0", "model.layers.0.output[1]"], {"tensor_parallel_size": 2})
    assert [(each["name"], each["width"], each["layout"]["label"]) for each in found] == [
        ("residual.0", 64, "replicated"),
        ("residual.1", 64, "replicated"),
        ("q.0", 128, "heads"),
        ("model.layers.0.output[1]", 64, "replicated"),
    ]
    assert found[3]["array"] == "model.layers.0.output.1"


def test_errors_come_back_as_themselves(model: str) -> None:
    with pytest.raises(UnknownLocation, match="close matches: residual"):
        probe_locations(model, ["residul.0"])


def test_a_model_that_vllm_cannot_build_is_told_with_vllms_words(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["NoSuchModel"]}')
    with pytest.raises(ProbeError, match="NoSuchModel"):
        probe_locations(str(tmp_path), ["embed"])


def test_the_table_of_a_model_needs_its_config_only(model: str) -> None:
    """What `harvest locations` prints."""
    console = Console(record=True, width=200, file=io.StringIO())
    print_locations(console, model)
    lines = [[cell.strip() for cell in line.split("│")[1:-1]] for line in console.export_text().splitlines()]
    rows = {cells[0]: cells[1:] for cells in lines if len(cells) == 4}
    assert rows["model.norm"][2] == "final_norm"
    assert rows["model.layers.0.mlp"] == ["Qwen2MLP", "output 64, inputs[0][0] 64", "mlp_in.0, mlp_out.0"]
    assert rows["lm_head"][1] == "not called in a pass"
