"""Driver, pool and engine actors on a real Ray cluster, over scripted engines."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from dataclasses import replace

import psutil
import pytest

from harvest.errors import RunError
from harvest.pool import EngineLost, EnginePool
from storage.commit import Committer
from storage.ledger import read_ledger
from storage.verify import verify
from tests.chaos.drive import drive, make_config, make_scripted_run, make_spec

pytestmark = pytest.mark.ray


def events_of(run, kind):
    return [event for line in run.events.read_text().splitlines() if (event := json.loads(line))["event"] == kind]


def test_a_killed_engine_is_replaced_and_nothing_is_lost_or_doubled(ray_cluster, tmp_path):
    run = make_scripted_run(tmp_path / "run", n_units=20)
    killed = []

    def kill_one():
        while not (run.events.exists() and events_of(run, "commit")):
            time.sleep(0.02)
        pid = events_of(run, "engine_ready")[0]["pid"]
        os.kill(pid, signal.SIGKILL)
        killed.append(pid)

    threading.Thread(target=kill_one, daemon=True).start()
    assert drive(run, make_config(run, engine_restarts=5), make_spec(run))
    assert killed
    assert len(events_of(run, "engine_lost")) == 1
    assert len(events_of(run, "engine_spawned")) == 3
    units = [event["unit"] for event in events_of(run, "commit")]
    assert sorted(units) == list(range(20))
    assert verify(run.path).ok


def test_a_unit_that_kills_every_engine_stops_the_run_and_keeps_the_rest(ray_cluster, tmp_path):
    run = make_scripted_run(tmp_path / "run", n_units=10)
    poison = run.plan.read_unit(9).to_pylist()[0]["invoke"]
    config = make_config(run, engines=1, attempts=3, engine_restarts=50)
    with pytest.raises(RunError, match=r"unit \d+ failed 3 times; .*engine died"):
        drive(run, config, make_spec(run, die_on=frozenset([poison])))
    committed = read_ledger(run.ledger).units
    assert 9 not in committed
    assert len(committed) >= 5
    assert drive(run, config, make_spec(run)), "the run resumes once the cause is gone"
    assert verify(run.path).ok


def test_a_cluster_without_room_for_engines_is_told(ray_cluster, tmp_path):
    run = make_scripted_run(tmp_path / "run", n_units=2)
    config = make_config(run, engines=2)
    engine = config.engine.model_copy(update={"cpus": 99})
    with pytest.raises(RunError, match=r"no node .* has room for an engine: .*engine\.cpus = 99\. Lower"):
        drive(run, config.model_copy(update={"engine": engine}), make_spec(run))
    engine = config.engine.model_copy(update={"cpus": 5})
    assert drive(run, config.model_copy(update={"engine": engine}), make_spec(run)), "one engine does it all"
    assert [(event["room"], event["count"]) for event in events_of(run, "few_engines")] == [(1, 2)]


def test_engines_outlive_a_commit_that_takes_longer_than_a_gone_driver_may_be_silent(
    ray_cluster, tmp_path, monkeypatch
):
    run = make_scripted_run(tmp_path / "run", n_units=4)
    publish = Committer.publish
    held: list[None] = []

    def publish_slowly(self, receipts):
        if not held:
            held.append(time.sleep(6))
        return publish(self, receipts)

    monkeypatch.setattr(Committer, "publish", publish_slowly)
    assert drive(run, make_config(run), replace(make_spec(run), driver_silence_s=2.0))
    assert held
    assert not events_of(run, "engine_lost")


def test_an_engine_without_a_driver_ends_itself(ray_cluster, tmp_path):
    run = make_scripted_run(tmp_path / "run", n_units=2)
    pool = EnginePool(replace(make_spec(run), driver_silence_s=2.0), count=1, cpus=0)
    try:
        [name] = pool.fill()
        while not pool.ready:
            pool.wait(0.1)
        pool._heartbeat.stop()
        pids = [stats.pid for stats in pool.final_stats(5).values()]
        events: list[EngineLost] = []
        while not events:
            events = [event for event in pool.wait(0.1) if isinstance(event, EngineLost)]
            pool.ask_stats()
        assert [event.engine for event in events] == [name]
        assert not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids)
    finally:
        pool.close()


def test_a_failing_engine_reports_its_own_error(ray_cluster, tmp_path):
    run = make_scripted_run(tmp_path / "run", n_units=2)
    config = make_config(run, engines=1, attempts=2)
    with pytest.raises(RunError, match="scripted failure on invokes"):
        drive(run, config, make_spec(run, raise_on=frozenset(range(400))))
