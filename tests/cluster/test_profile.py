"""`harvest run --profile` from end to end: real Ray, real vLLM, the tables and the file."""

from __future__ import annotations

import json

import pytest

from actors.profile import MAIN_STAGES, EngineProfile
from tests.whole_runs import harvest, write_config

pytestmark = pytest.mark.ray


def test_a_profiled_run_says_where_its_time_went(tiny_qwen3, demo_text, tmp_path):
    config = write_config(tmp_path, tiny_qwen3, demo_text)
    shown = harvest("run", config, "--profile").stdout
    run = tmp_path / "run"
    for words in ("Where the time went", "start-up", "forward", "gated", "together", "writer threads", "committing"):
        assert words in shown
    written = json.loads((run / "profile.json").read_text())
    assert list(written) == ["engine-0", "run"]
    profile = EngineProfile.from_json(written["engine-0"])
    shares = written["engine-0"]["shares"]
    assert sum(shares[stage] for stage in MAIN_STAGES) == pytest.approx(1, abs=1e-4)
    for stage in ("start", "plan", "feed", "forward", "snapshot", "settle", "write", "seal", "commit"):
        assert profile.seconds(stage) > 0, stage
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    spawned, ready, last = (
        [event["time_s"] for event in events if event["event"] == kind][-1]
        for kind in ("engine_spawned", "engine_ready", "commit")
    )
    assert profile.start_s == pytest.approx(ready - spawned, abs=0.2)
    assert profile.serving_s == pytest.approx(last - ready, abs=1.0)
    n_tokens = sum(event["n_prompt_tokens"] for event in events if event["event"] == "commit")
    assert profile.n_step_tokens == n_tokens, "of all steps, the last ones included"
    assert f"{run}/profile.json" in harvest("status", run).stdout
