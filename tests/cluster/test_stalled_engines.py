"""Engines that live and do nothing, on a real Ray cluster: they are given up, and the run goes on without them."""

from __future__ import annotations

import signal
import threading
import time

import psutil
import pytest

from storage.verify import verify
from tests.chaos.drive import drive, make_config, make_scripted_run, make_spec
from tests.cluster.test_driver import events_of

pytestmark = pytest.mark.ray

STALL_S = 5


@pytest.fixture(scope="module")
def undisturbed(ray_cluster, tmp_path_factory):
    run = make_scripted_run(tmp_path_factory.mktemp("undisturbed") / "run", n_units=20)
    assert drive(run, make_config(run), make_spec(run))
    assert not events_of(run, "engine_lost")
    return run


def assert_same_store(run, other):
    assert verify(run.path).ok
    files = [path.relative_to(other.data) for path in sorted(other.data.rglob("*")) if path.is_file()]
    assert files
    for file in files:
        assert (run.data / file).read_bytes() == (other.data / file).read_bytes(), file
    assert sorted(event["unit"] for event in events_of(run, "commit")) == list(range(20))


def test_a_stopped_engine_is_given_up_with_its_processes(ray_cluster, undisturbed, tmp_path):
    run = make_scripted_run(tmp_path / "run", n_units=20)
    stopped: list[psutil.Process] = []

    def stop_one():
        while not (run.events.exists() and events_of(run, "commit")):
            time.sleep(0.02)
        stopped.append(psutil.Process(events_of(run, "engine_ready")[0]["pid"]))
        stopped[0].suspend()

    thread = threading.Thread(target=stop_one, daemon=True)
    thread.start()
    try:
        assert drive(run, make_config(run, stall_s=STALL_S), make_spec(run))
        thread.join()
        gone, left = psutil.wait_procs(stopped, timeout=30)
        assert (len(gone), left) == (1, [])
    finally:
        for process in stopped:
            if process.is_running():
                process.send_signal(signal.SIGKILL)
    [lost] = events_of(run, "engine_lost")
    assert lost["engine"] == events_of(run, "engine_ready")[0]["engine"]
    assert lost["stalled"]
    assert lost["units"]
    assert "(limits.stall_s = 5), no answer for" in lost["reason"]
    assert len(events_of(run, "engine_spawned")) == 3
    assert_same_store(run, undisturbed)


def test_an_engine_whose_step_hangs_still_tells_its_stage(ray_cluster, undisturbed, tmp_path):
    """It could not if the thread that hangs were the one that answers."""
    run = make_scripted_run(tmp_path / "run", n_units=20)
    poison = run.plan.read_unit(9).to_pylist()[0]["invoke"]
    spec = make_spec(run, hang_on=frozenset([poison]), hang_attempts=1)
    assert drive(run, make_config(run, engines=1, stall_s=STALL_S), spec)
    [lost] = events_of(run, "engine_lost")
    assert lost["stalled"]
    assert 9 in lost["units"]
    assert "its thread was in the stage forward: a step does not end" in lost["reason"]
    pid = events_of(run, "engine_ready")[0]["pid"]
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert_same_store(run, undisturbed)
