"""All-zero and non-finite rows, and taps that do not fire, in a real engine: named, never stored in silence."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from actors.protocol import Lease, UnitFailure
from actors.worker import taps
from actors.worker.locations import resolve_locations
from actors.worker.tree import build_model_tree
from harvest.commits import suspicious_rows
from harvest.verification import verify_run
from storage.commit import Committer
from storage.reader import StoreReader
from tests.harness import engine, make_run

ZERO, INFINITE = 900, 901  # tokens; the self-test uses small ids
NAMES = ("embed", "residual.0", "mlp_out.1")
PROMPTS = ([5, 6, ZERO, 7], [ZERO, INFINITE, 8], [9, 10, 11])


@pytest.fixture(scope="module")
def model(tiny_qwen3, tmp_path_factory):
    import shutil

    path = tmp_path_factory.mktemp("unusual") / "model"
    shutil.copytree(tiny_qwen3, path)
    weights = load_file(path / "model.safetensors")
    weights["model.embed_tokens.weight"][ZERO] = 0
    weights["model.embed_tokens.weight"][INFINITE] = torch.inf
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture(scope="module")
def locations(model):
    return resolve_locations(build_model_tree(str(model)), NAMES)


def test_all_zero_and_non_finite_rows_are_named_and_a_lost_tap_fails_its_unit(model, locations, tmp_path, monkeypatch):
    run = make_run(tmp_path / "run", PROMPTS, locations)
    with engine(run, model, locations) as feeder, Committer.open(run) as committer:
        # A tap that a step has lost: the unit fails, with the tap's name, and the engine goes on.
        with monkeypatch.context() as patch:
            patch.setattr(taps.TapSet, "end_step", _without_one_tap(taps.TapSet.end_step, "mlp_out.1"))
            failure = feeder.submit(Lease(unit=0, attempt=committer.next_attempt(0))).result(60)
        assert isinstance(failure, UnitFailure)
        assert "mlp_out.1" in failure.message
        assert "did not fire" in failure.message
        receipt = feeder.submit(Lease(unit=0, attempt=committer.next_attempt(0))).result(60)
        assert not isinstance(receipt, UnitFailure), receipt.traceback
        assert receipt.storage is not None
        committer.publish([receipt.storage])
        committer.finalise()
    # The run's events and its summary.
    named = suspicious_rows(receipt.storage)
    assert named["embed"] == "1 non-finite, 2 all-zero of 10 rows"
    # The token itself and those after it; a kernel that multiplies masked values by zero adds those before.
    assert named["residual.0"] in [f"{n} non-finite, 0 all-zero of 10 rows" for n in (2, 3)]
    # `harvest verify`, by location and row.
    report = verify_run(run.path)
    assert not report.passed
    said = io.StringIO()
    report.print(Console(file=said, width=200))
    text = said.getvalue()
    assert "acts/embed" in text
    assert "1 rows hold NaN or infinity, the first is row" in text
    assert "2 of 10 rows are all zero" in text
    # The rows of the other requests in the same steps are sound.
    reader = StoreReader(run)
    assert np.isfinite(reader.prompt(0).rows["mlp_out.1"]).all()
    assert np.isfinite(reader.prompt(2).rows["mlp_out.1"]).all()


def _without_one_tap(end_step, name):
    def end(self):
        for tap in self._taps:
            if tap.location.name == name:
                tap.fired = False
        return end_step(self)

    return end
