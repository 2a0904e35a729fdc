"""What a run says: events, progress, summary. Nothing is lost from it, and foreign text cannot break it."""

from __future__ import annotations

import io
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from harvest import inspection
from harvest.commits import total_units
from harvest.config import parse_config
from harvest.errors import ConfigError
from harvest.events import EventLog
from harvest.pool import count_room
from harvest.progress import ProgressView
from harvest.runs import open_or_plan, summarise
from harvest.summary import print_summary, read_events, sum_events
from storage.ledger import read_ledger
from storage.plan_files import PlanSource
from storage.run_folder import RunFolder
from storage.testing import ScriptedRun

SCRIPT = ScriptedRun(seed=5, n_units=3, rows_per_shard=128, shards_per_unit=1)
# Text that rich takes for a closing tag, for a style, and for an emoji.
MARKUP = "[/nothing] [red]x :100:"


def make_run(path: Path) -> RunFolder:
    totals = {"n_invokes": len(SCRIPT.invokes), "n_skipped": SCRIPT.n_skipped}
    plan = SCRIPT.plan()
    keyed = (unit.set_column(1, "key", [[MARKUP] * len(unit)]) for unit in plan.units)
    run = RunFolder.create(
        path,
        layout=SCRIPT.layout,
        plan=PlanSource(units=keyed, skipped=plan.skipped),
        run=totals,
        config_toml="",
        provenance={},
    )
    SCRIPT.finish(run)
    return run


def commit_event(unit: int) -> dict[str, Any]:
    invokes = SCRIPT.of_unit(unit)
    n_rows = sum(x.n_rows for x in invokes)
    return {
        "unit": unit,
        "n_invokes": len(invokes),
        "n_prompt_tokens": sum(x.n_prompt for x in invokes),
        "n_generated_tokens": len(invokes),
        "stored_bytes": n_rows * (32 * 2 + 24 * 4 + 2 * 4),
        "suspicious": {},
    }


def test_units_without_an_event_count_all_the_same(tmp_path):
    """A driver killed between the ledger's line and the event, then a run whose events are gone."""
    run = make_run(tmp_path / "run")
    with EventLog(run.events) as events:
        for unit in range(3):
            events.emit("commit", **commit_event(unit))
    whole = summarise(run.path)
    assert whole.n_stored_invokes == len(SCRIPT.invokes)
    units = read_ledger(run.ledger).units
    told = total_units(run, units, sum_events(read_events(run.events)).commits)
    assert total_units(run, units, {}) == told
    lines = run.events.read_text().splitlines(keepends=True)
    for kept in (lines[:2], []):
        run.events.write_text("".join(kept))
        assert summarise(run.path) == whole


def test_a_torn_line_swallows_no_event(tmp_path):
    path = tmp_path / "events.jsonl"
    with EventLog(path) as events:
        events.emit("engine_ready", engine="engine-0")
        events.emit("commit", unit=0)
    path.write_bytes(path.read_bytes()[:-9])
    with EventLog(path) as events:
        events.emit("session", pid=1)
    with EventLog(path):
        pass
    assert [event["event"] for event in read_events(path)] == ["engine_ready", "session"]
    assert len(path.read_text().splitlines()) == 3


def test_a_run_goes_on_with_arguments_only_that_a_new_one_may_have(tmp_path):
    run = make_run(tmp_path / "run")
    raw = {
        "model": {"name": "m"},
        "dataset": {"path": "d"},
        "capture": {"locations": ["residual.1"]},
        "store": {"path": str(run.path)},
        "engine": {"vllm": {"enable_prefix_caching": True}},
    }
    with pytest.raises(ConfigError, match="enable_prefix_caching = True cannot be used"):
        open_or_plan(parse_config(raw))


def shown(show: Any) -> str:
    console = Console(width=10_000, emoji=False, soft_wrap=True, file=io.StringIO(), record=True)
    show(console)
    return console.export_text()


def test_errors_are_shown_as_they_are():
    def show(console):
        view = ProgressView(console, n_tokens=10, n_committed_tokens=0)
        view({"event": "unit_failed", "unit": 1, "error": f"first {MARKUP}"})
        view({"event": "engine_lost", "engine": "engine-0", "reason": f"second {MARKUP}"})
        view({"event": "engine_lost", "engine": "engine-1", "reason": f"third {MARKUP}", "stalled": True})
        view({"event": "few_engines", "room": 1, "count": 2})

    text = shown(show)
    assert f"unit 1 failed: first {MARKUP}\n" in text
    assert f"engine-0 died: second {MARKUP}; its units run again" in text
    assert f"engine-1 was given up: third {MARKUP}; its units run again" in text
    assert "room for 1 of 2 engines" in text


def test_folders_and_keys_are_shown_as_they_are(tmp_path):
    folder = tmp_path / "[red][" / "nothing]"
    folder.parent.mkdir()
    run = make_run(folder)
    assert shown(lambda console: print_summary(console, summarise(run.path))).count(str(folder)) == 3
    assert str(folder) in shown(lambda console: inspection.print_run(console, run.path))
    assert f"(key {MARKUP})" in shown(lambda console: inspection.print_invoke(console, run.path, 0))


def test_the_rate_begins_anew_when_counters_are_lost_with_an_engine(monkeypatch):
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    view = ProgressView(Console(quiet=True), n_tokens=10_000, n_committed_tokens=0)
    for n_tokens in (0, 1000, 2000, 500, 700):
        now += 1.0
        view({"event": "progress", "n_tokens": n_tokens, "written_bytes": n_tokens})
    assert view._rates(2000).startswith("200 tokens/s")


def node(cpus: float, gpus: float = 0, *, alive: bool = True) -> dict[str, Any]:
    return {"Alive": alive, "Resources": {"CPU": cpus, **({"GPU": gpus} if gpus else {})}}


@pytest.mark.parametrize(
    ("nodes", "cpus", "gpus", "room"),
    [
        ([node(2)], 1, 0, 2),
        ([node(2)], 4, 0, 0),
        ([node(2), node(3)], 2, 0, 2),
        ([node(64, 1), node(64, 1)], 1, 2, 0),
        ([node(64, 8), node(64)], 1, 2, 4),
        ([node(64, 8, alive=False), node(64, 2)], 1, 2, 1),
        ([node(1)], 0, 0, 9),
        ([node(4)], 0.5, 0, 8),
    ],
)
def test_room_for_engines(nodes, cpus, gpus, room):
    assert count_room(nodes, cpus=cpus, gpus=gpus, most=9) == room
