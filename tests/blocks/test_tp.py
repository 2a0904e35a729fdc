"""Two tensor-parallel ranks give what one gives: whole values in TP=1 order, edits on all ranks, saved once.

The engines run in child processes: an engine with two ranks binds this process's threads for good.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found(tiny_qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """What `tests.blocks.tp_program` found on one rank and on two."""
    return _run(tiny_qwen3, tmp_path_factory.mktemp("tp"))


def _run(model: Path, folder: Path, *options: str) -> dict[int, dict[str, Any]]:
    results = {}
    for ranks in (1, 2):
        path = folder / f"{ranks}.pkl"
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        subprocess.run(
            [sys.executable, "-m", "tests.blocks.tp_program", str(model), str(ranks), str(path), *options],
            cwd=ROOT,
            check=True,
            env=environment,
            timeout=900,
        )
        results[ranks] = pickle.loads(path.read_bytes())
    return results


def close(one: Any, other: Any) -> bool:
    return one.shape == other.shape and bool(torch.allclose(one.float(), other.float(), atol=1e-4))


def test_every_value_is_whole_and_in_order(found: dict[int, dict[str, Any]]) -> None:
    for one, other in zip(found[1]["values"], found[2]["values"], strict=True):
        assert set(one) == set(other)
        for name in one:
            assert close(one[name], other[name]), name


def test_slices_of_fused_projections_mean_the_same(found: dict[int, dict[str, Any]]) -> None:
    values = found[2]["values"][0]
    assert torch.equal(values["qkv"][:, 128:192].reshape(values["k_norm"].shape), values["k_norm"])
    gate, up = values["gate_up"].chunk(2, dim=-1)
    assert torch.allclose(torch.nn.functional.silu(gate) * up, values["neurons"], atol=1e-5)


def test_generation_with_edits_is_the_same(found: dict[int, dict[str, Any]]) -> None:
    assert found[1]["tokens"] == found[2]["tokens"]
    assert found[1]["edited tokens"] == found[2]["edited tokens"]
    assert found[1]["tokens"] != found[1]["edited tokens"]


@pytest.mark.parametrize("name", ["o_proj input", "one head", "qkv slice", "neurons", "gate_up replaced", "mlp"])
def test_an_edit_lands_alike(found: dict[int, dict[str, Any]], name: str) -> None:
    assert close(found[1]["edits"][name], found[2]["edits"][name])
    assert not torch.allclose(found[1]["edits"][name], found[1]["edits"]["none"], atol=1e-4)


def test_values_come_back_once(found: dict[int, dict[str, Any]]) -> None:
    assert found[2]["lists"] == found[1]["lists"]
    assert found[2]["lists"] == [[0, 1, 2], [0, 1, 2]]


def test_no_block_is_left_on_any_rank(found: dict[int, dict[str, Any]]) -> None:
    assert found[1]["left"] == [0]
    assert found[2]["left"] == [0, 0]


def test_an_error_fails_its_request_alone(found: dict[int, dict[str, Any]]) -> None:
    assert found[2]["error"] == found[1]["error"]
    assert found[2]["error"]["cause"] == "ZeroDivisionError"


def test_operations_inside_a_forward_are_refused_on_several_ranks(found: dict[int, dict[str, Any]]) -> None:
    assert found[1]["source"] is None
    assert "one rank's part" in found[2]["source"]


def test_a_block_that_runs_away_costs_the_engine_and_the_next_trace_starts_another(
    found: dict[int, dict[str, Any]],
) -> None:
    assert found[1]["runaway"] == "BlockError"
    assert found[2]["runaway"] == "EngineReplacedError"
    assert found[2]["after runaway"] == found[1]["after runaway"]


def test_experts_of_a_mixture_are_whole_and_writable(tmp_path: Path) -> None:
    from tests.blocks.test_families import make_reference
    from tests.tiny_models import train_tokenizer

    train_tokenizer(tmp_path / "model")
    make_reference("qwen3-moe").save_pretrained(tmp_path / "model")
    found = _run(tmp_path / "model", tmp_path, "--experts")
    for one, other in zip(found[1]["values"], found[2]["values"], strict=True):
        for name in one:
            assert close(one[name], other[name]), name
        assert other["experts"].abs().max() > 0
        assert other["mlp"][-1].abs().max() == 0
    assert found[2]["left"] == [0, 0]
