"""`harvest verify --parity` where values cannot be recomputed: an error that says why, never a traceback."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from harvest import cli, cluster, verification
from harvest.errors import HarvestError, RunError
from harvest.parity import ParityError, compare
from storage.testing import ScriptedRun
from tests.adapters import make_tiny_adapter


def test_a_model_that_is_gone_is_named(tmp_path):
    with pytest.raises(ParityError, match=r"cannot load the run's model .*gone.*without --parity"):
        compare(str(tmp_path / "gone"), [], compute_dtype="float32", store_dtype="float32")


def test_an_adapter_that_is_gone_or_another_is_named(tiny_qwen3, tmp_path):
    folder = make_tiny_adapter(tiny_qwen3, tmp_path / "lora")
    with pytest.raises(ParityError, match="adapter is needed .* its bytes are others"):
        verification._find_adapter({"name": str(folder), "sha256": "0" * 64})
    with pytest.raises(ParityError, match="adapter is needed .* no such folder"):
        verification._find_adapter({"name": str(tmp_path / "gone"), "sha256": ""})


def test_prompts_without_a_row_are_an_error_not_a_failure(monkeypatch):
    plan = pa.table({"unit": [0, 0], "invoke": [0, 1]})
    run = {"selection": {"source": "generated"}, "content": {}, "locations": [], "model": ""}
    reader = SimpleNamespace(
        run=SimpleNamespace(run=run, plan=SimpleNamespace(summary=lambda: plan)),
        committed={0},
        prompt=lambda invoke: SimpleNamespace(positions=np.zeros(0, np.int32)),
    )
    monkeypatch.setattr(verification, "StoreReader", lambda path: reader)
    with pytest.raises(ParityError, match="none of the 2 prompts .* has a stored row"):
        verification._compare("run", 8, 0)


def test_a_report_that_cannot_be_written_is_told(tmp_path):
    script = ScriptedRun(n_units=1)
    run = script.create(tmp_path / "run")
    script.finish(run)
    with pytest.raises(HarvestError, match=r"cannot be written to .*report\.json: No such file"):
        cli.verify(run.path, parity=0, seed=0, report=tmp_path / "nowhere" / "report.json")


def test_parity_that_damage_prevents_is_told(tmp_path, capsys):
    script = ScriptedRun(n_units=1)
    run = script.create(tmp_path / "run")
    script.finish(run)
    (run.data / "acts" / "residual.1" / "c.0.0").unlink()
    verification.verify_run(run.path, parity=4).print(cli.console)
    assert "parity not computed: the store is damaged" in capsys.readouterr().out


def test_a_ray_cluster_that_does_not_answer_is_named(monkeypatch):
    import ray

    def refuse(**arguments):
        raise ConnectionError("nobody is there")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", refuse)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    with (
        pytest.raises(RunError, match=r"RAY_ADDRESS = 10\.0\.0\.1:6379: nobody is there\. Start it"),
        cluster.connected(),
    ):
        pass
