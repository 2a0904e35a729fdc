"""Host memory is bounded by configuration, whatever the dataset. Real vLLM, real store."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import psutil
import pytest

from actors.protocol import Lease, UnitFailure
from actors.worker.locations import resolve_locations
from actors.worker.tree import build_model_tree
from storage.commit import Committer
from tests.harness import engine, make_run
from tests.tiny_models import make_tiny_model

LONG = 32_000


class Peak:
    """Samples memory and pending rows of an engine in this process."""

    def __init__(self, feeder) -> None:
        self._feeder = feeder
        self._process = psutil.Process()
        self._ended = threading.Event()
        self.rss_bytes = self.pending_bytes = 0

    def __enter__(self):
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error):
        self._ended.set()
        self._thread.join()

    def _sample(self):
        sink = sink_of(self._feeder)
        while not self._ended.is_set():
            self.rss_bytes = max(self.rss_bytes, self._process.memory_info().rss)
            self.pending_bytes = max(self.pending_bytes, sink.pending_bytes)
            time.sleep(0.002)


def sink_of(feeder: Any) -> Any:
    """The sink of the only rank, which lives in this process."""
    return feeder._llm._engine.model_executor.driver_worker.worker.harvester._sink


def run_units(feeder, committer, units):
    futures = [feeder.submit(Lease(unit=unit, attempt=committer.next_attempt(unit))) for unit in units]
    results = [future.result(300) for future in futures]
    for result in results:
        assert not isinstance(result, UnitFailure), result.traceback
    return results


def test_memory_does_not_grow_with_the_dataset(tiny_qwen3, tmp_path):
    """One unit and ten more on one engine: the process stays as large as it was, within 5 %."""
    random = np.random.default_rng(3)
    n_warm, n_units = 3, 14
    prompts = [random.integers(5, 1000, int(n)).tolist() for n in random.integers(20, 200, 20 * n_units)]
    locations = resolve_locations(build_model_tree(str(tiny_qwen3)), ["residual.*", "mlp_out.*"])
    run = make_run(tmp_path / "run", prompts, locations, n_units=n_units, unit_rows=8192)
    with engine(run, tiny_qwen3, locations, ring_bytes=64 << 20) as feeder, Committer.open(run) as committer:
        run_units(feeder, committer, range(n_warm))
        with Peak(feeder) as once:
            run_units(feeder, committer, [n_warm])
        with Peak(feeder) as tenfold:
            receipts = run_units(feeder, committer, range(n_warm + 1, n_units))
    assert sum(receipt.stored_bytes for receipt in receipts) > 50 << 20
    print(f"1x {once.rss_bytes:,} bytes, 10x {tenfold.rss_bytes:,} bytes")
    assert tenfold.rss_bytes < 1.05 * once.rss_bytes


@pytest.mark.slow
def test_a_prompt_of_32k_tokens_at_all_layers_stays_inside_the_ring(tmp_path):
    """129 MB of rows of one request pass through a ring of 24 MB, while the disk stalls until it is full."""
    model = make_tiny_model("qwen3", tmp_path / "model", layers=4, max_length=33_000)
    prompts = [np.random.default_rng(seed).integers(5, 1000, LONG).tolist() for seed in range(2)]
    names = ["residual.*", "mlp_out.*"]
    locations = resolve_locations(build_model_tree(str(model)), names)
    run = make_run(tmp_path / "run", prompts, locations, n_units=2, rows_per_shard=32_768, unit_rows=32_768)
    ring_bytes = 24 << 20
    with (
        engine(
            run,
            model,
            locations,
            max_model_len=33_000,
            ring_bytes=ring_bytes,
            writer_threads=1,
            vllm={"max_num_batched_tokens": 1024, "max_num_seqs": 4},
        ) as feeder,
        Committer.open(run) as committer,
    ):
        run_units(feeder, committer, [0])
        sink = sink_of(feeder)
        sink._open_writer = _stalled(sink._open_writer, until=lambda: feeder.stats.gated_s > 0)
        before = psutil.Process().memory_info().rss
        with Peak(feeder) as peak:
            (receipt,) = run_units(feeder, committer, [1])
        gated_s = feeder.stats.gated_s
    assert (receipt.n_rows, receipt.stored_bytes) == (LONG, LONG * 8 * 128 * 4)
    grown_bytes = peak.rss_bytes - before
    print(f"pending {peak.pending_bytes:,} of {ring_bytes:,} bytes, gated {gated_s:.1f} s, grown {grown_bytes:,}")
    assert gated_s > 0, "the ring was never full: the test does not test what it says"
    assert peak.pending_bytes <= ring_bytes
    assert grown_bytes < 2 * ring_bytes


def _stalled(open_writer, *, until):
    def open_stalled(unit, attempt):
        writer = open_writer(unit, attempt)
        write = writer.write

        def wait_and_write(*arguments):
            while not until():
                time.sleep(0.01)
            write(*arguments)

        writer.write = wait_and_write
        return writer

    return open_stalled
