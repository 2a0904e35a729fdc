"""The end of an engine's processes: all of them, also stopped ones, and nobody else's."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace

import psutil
import pytest

from actors.processes import end_process, own_process

# Starts a child of its own, and says when it is there.
PARENT = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture
def parent():
    started = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert started.stdout.readline() == "ready\n"
    process = psutil.Process(started.pid)
    family = [process, *process.children(recursive=True)]
    yield process
    for each in family:
        if each.is_running():
            each.kill()
    started.stdout.close()
    started.wait()


def wait_until_ended(process):
    deadline = time.monotonic() + 30
    # Whoever inherits an orphan may take its time to ask for its end.
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, process
        time.sleep(0.02)


def id_of(process):
    return replace(own_process("node"), pid=process.pid, started_s=process.create_time())


def test_a_stopped_process_ends_with_its_children(parent):
    [child] = parent.children()
    child.suspend()
    parent.suspend()
    end_process(id_of(parent))
    for process in (parent, child):
        wait_until_ended(process)


def test_another_process_of_the_same_number_is_left_alone(parent):
    end_process(replace(id_of(parent), started_s=parent.create_time() - 60))
    assert parent.is_running()
    assert parent.status() != psutil.STATUS_ZOMBIE
    assert parent.children()


def test_a_process_that_is_gone_is_no_error(parent):
    process = id_of(parent)
    end_process(process)
    wait_until_ended(parent)
    end_process(process)
