"""A disk that stalls for longer than vLLM's own time-outs (300 s) under two ranks: the engine waits, and goes on.

Back-pressure is in the actor: no worker blocks inside a step, which would trip vLLM's executor time-out.
"""

from __future__ import annotations

import os
import time

import numpy as np
import psutil
import pytest

from actors.protocol import Lease, UnitFailure
from actors.worker.llm import Llm
from actors.worker.locations import resolve_locations
from actors.worker.tree import build_model_tree
from storage.commit import Committer
from tests.harness import engine, make_run

STALL_S = float(os.environ.get("HARVEST_STALL_S", "310"))


@pytest.mark.slow
def test_a_stall_longer_than_vllms_time_out_under_two_ranks(tiny_qwen3, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    random = np.random.default_rng(1)
    prompts = [random.integers(5, 1000, 200).tolist() for _ in range(100)]
    locations = resolve_locations(build_model_tree(str(tiny_qwen3)), ["residual.0", "residual.3"])
    run = make_run(tmp_path / "run", prompts, locations)
    stalled = tmp_path / "stalled"
    stalled.touch()

    def make(spec):
        llm = Llm(spec)

        def stall(worker, path=str(stalled)):
            """Writers of this rank wait while the file is there."""
            import os
            import time

            sink = worker.harvester._sink
            open_writer = sink._open_writer

            def open_stalled(unit, attempt):
                writer = open_writer(unit, attempt)
                write = writer.write

                def wait_and_write(*arguments):
                    while os.path.exists(path):
                        time.sleep(0.05)
                    write(*arguments)

                writer.write = wait_and_write
                return writer

            sink._open_writer = open_stalled

        llm._engine.collective_rpc(stall)
        return llm

    monkeypatch.setattr("tests.harness.Llm", make)
    ring_bytes = 6 * 128 * 2 * 128 * 4  # six steps
    with (
        engine(
            run,
            tiny_qwen3,
            locations,
            tensor_parallel_size=2,
            ring_bytes=ring_bytes,
            vllm={"max_num_batched_tokens": 128},
        ) as feeder,
        Committer.open(run) as committer,
    ):
        future = feeder.submit(Lease(unit=0, attempt=committer.next_attempt(0)))
        deadline = time.monotonic() + 60
        while feeder.stats.gated_s < 1 and time.monotonic() < deadline:
            time.sleep(0.1)
        begun, steps, memory = time.monotonic(), feeder.stats.n_steps, memory_bytes()
        assert 0 < feeder.stats.pending_bytes <= ring_bytes
        while time.monotonic() - begun < STALL_S:
            time.sleep(1)
            assert not future.done()
            assert feeder.stats.n_steps == steps, "the engine went on although nothing could be written"
            assert feeder.stats.pending_bytes <= ring_bytes
        grown = memory_bytes() - memory
        stalled.unlink()
        result = future.result(120)
        gated_s = feeder.stats.gated_s
    assert not isinstance(result, UnitFailure), result.traceback
    print(f"stalled {STALL_S:.0f} s after {steps} steps, gated {gated_s:.0f} s, {grown:,} of {memory:,} bytes grown")
    assert gated_s >= STALL_S
    assert grown < 0.05 * memory
    assert result.n_rows == sum(map(len, prompts))


def memory_bytes():
    """Resident memory of this process and its ranks."""
    process = psutil.Process()
    return sum(each.memory_info().rss for each in (process, *process.children(recursive=True)))
