"""An engine whose taps misbehave does not start, and says what is wrong."""

from __future__ import annotations

import numpy as np
import pytest

from actors.worker import taps
from actors.worker.harvester import Harvester
from actors.worker.locations import resolve_locations
from actors.worker.self_test import PROMPTS, SelfTest, SelfTestError
from actors.worker.tree import build_model_tree
from tests.harness import engine, make_run


@pytest.fixture(scope="module")
def locations(tiny_qwen3):
    return resolve_locations(build_model_tree(str(tiny_qwen3)), ["residual.1", "mlp_out.2"])


def test_rows_that_do_not_change_with_the_prompt_are_refused(tiny_qwen3, locations, tmp_path, monkeypatch):
    first: dict[str, object] = {}

    def stale(self, x, residual, location=None):
        rows = take(self, x, residual, location)
        return first.setdefault(location.name, rows) if location is not None else rows

    take = taps.TapSet.take_rows
    monkeypatch.setattr(taps.TapSet, "take_rows", stale)
    run = make_run(tmp_path / "run", [[5, 6, 7]], locations)
    with (
        pytest.raises(SelfTestError, match=r"residual.1: the same rows for different prompts; mlp_out.2: the same"),
        engine(run, tiny_qwen3, locations),
    ):
        pass


def test_rows_of_other_tokens_are_refused(tiny_qwen3, locations, tmp_path, monkeypatch):
    begin_step = Harvester.begin_step
    monkeypatch.setattr(Harvester, "begin_step", lambda self, step, ids: begin_step(self, step, ids.roll(1)))
    run = make_run(tmp_path / "run", [[5, 6, 7]], locations)
    with (
        pytest.raises(SelfTestError, match=r"vLLM .* failed the self-test of its taps: rows of tokens"),
        engine(run, tiny_qwen3, locations),
    ):
        pass


def test_each_kind_of_problem_is_named():
    ids = [list(prompt) for prompt in PROMPTS]
    wanted = list(range(len(ids[0])))

    def outcome(**changes):
        test = SelfTest()
        for prompt in range(2):
            rows = np.random.default_rng(prompt).normal(size=(7, 4)).astype(np.float32)
            fields = {"token_ids": ids[prompt], "positions": wanted, "rows": {"a": rows}}
            test.add(prompt, **{**fields, **{name: make(fields[name]) for name, make in changes.items()}})
        return " ".join(test.problems(wanted=wanted, names=["a"]))

    assert outcome() == ""
    assert "instead of" in outcome(positions=lambda positions: positions[1:])
    assert "rows of tokens" in outcome(token_ids=lambda token_ids: token_ids[::-1])
    assert "not finite" in outcome(rows=lambda rows: {"a": rows["a"] * np.nan})
    assert "all zero" in outcome(rows=lambda rows: {"a": rows["a"] * 0})
    assert "6 and 6 rows" in outcome(rows=lambda rows: {"a": rows["a"][1:]})
