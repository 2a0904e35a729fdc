"""A disk that takes nothing under a real feeder and sink: the engine still answers, and the watch names the stage."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from actors.fake_engine import ScriptedLlm
from actors.protocol import Lease, Receipt
from harvest.stalls import LOOKS, StallWatch
from tests.actors.test_feeder import LOCATIONS
from tests.actors.test_profile import Feeding
from tests.harness import make_run

LIMIT_S = 900.0


@pytest.mark.parametrize(("method", "stage"), [("write", "gated"), ("seal", "sealing")])
def test_a_disk_that_takes_nothing_is_a_stall_of_that_stage(tmp_path, method, stage):
    random = np.random.default_rng(0)
    run = make_run(tmp_path / "run", [random.integers(0, 1000, 200).tolist() for _ in range(40)], LOCATIONS)
    release = threading.Event()
    watch, lease = StallWatch(LIMIT_S), Lease(unit=0, attempt=1)
    ring_bytes = 3 * ScriptedLlm.max_step_tokens * 2 * 64 * 4 if method == "write" else 1 << 30
    with Feeding(run, ring_bytes=ring_bytes) as feeding:
        feeding.slow_down(method, lambda: release.wait(60))
        try:
            future = feeding.feeder.submit(lease)
            deadline = time.monotonic() + 30
            while feeding.feeder.stats.profile.seconds(stage) < 0.1:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            stalls = []
            for turn in range(4 * LOOKS):  # the watch's seconds are not the clock's
                watch.hear("engine-0", feeding.feeder.stats)
                stalls += watch.look(turn * LIMIT_S / LOOKS, {"engine-0": {lease}})
                if stalls:
                    break
                time.sleep(0.02)
        finally:
            release.set()
        assert isinstance(future.result(60), Receipt)
    [stall] = stalls
    assert stall.stage == stage
    assert stall.unanswered_s == 0
    assert f"its thread was in the stage {stage}" in stall.reason
    assert "the disk takes none" in stall.reason
