"""Steps of short prompts are full: settings that the user leaves open, and steps counted on a real engine."""

from __future__ import annotations

import threading
from functools import partial

import numpy as np
import pytest

from actors.feeder import Feeder, read_planned
from actors.protocol import EngineSpec, Lease, Receipt
from actors.selection import Selection
from actors.step_size import CPU_STEP_TOKENS, step_arguments
from actors.worker.llm import Llm
from actors.worker.locations import resolve_locations
from actors.worker.tree import build_model_tree
from storage.commit import Committer
from storage.reader import StoreReader
from tests.harness import make_run

GIB = 1 << 30


def chosen(vllm=None, **changes):
    fields = {"on_cpu": False, "generates": False, "row_bytes": 8192, "ring_bytes": GIB, "prompt_tokens": 1000.0}
    return step_arguments(vllm or {}, **{**fields, "max_model_len": 2048, **changes})


def test_settings_of_long_and_short_prompts():
    assert chosen() == {"max_num_batched_tokens": 8192, "max_num_seqs": 128, "max_cudagraph_capture_size": 256}
    assert chosen(prompt_tokens=64)["max_num_seqs"] == 256, "twice as many as 8192 tokens of 64 need"
    assert chosen(prompt_tokens=8)["max_num_seqs"] == 1024, "bounded, whatever the prompts"
    assert chosen(prompt_tokens=0)["max_num_seqs"] == 256, "a length that is not known"
    assert chosen(prompt_tokens=8, on_cpu=True) == {"max_num_batched_tokens": 2048, "max_num_seqs": 512}
    assert chosen(generates=True) == {"max_num_batched_tokens": 8192, "max_num_seqs": 256}


def test_the_ring_bounds_a_step():
    all_layers = 36 * 8192
    tokens = chosen(row_bytes=all_layers)["max_num_batched_tokens"]
    assert tokens == 512
    assert 4 * tokens * all_layers <= GIB
    assert chosen(row_bytes=all_layers, ring_bytes=16 * GIB)["max_num_batched_tokens"] == 8192
    tiny = chosen(row_bytes=all_layers, ring_bytes=1000, prompt_tokens=1)
    assert tiny["max_num_batched_tokens"] == tiny["max_num_seqs"] == 256, "the feeder says what to do"


def test_what_the_user_sets_stands_and_the_rest_fits_it():
    assert chosen({"max_num_batched_tokens": 200}, prompt_tokens=1) == {
        "max_num_seqs": 200,
        "max_cudagraph_capture_size": 256,
    }
    assert chosen({"max_num_seqs": 9000})["max_num_batched_tokens"] == 9000, "vLLM wants a token for each request"
    assert chosen({"enable_chunked_prefill": False}, max_model_len=30000)["max_num_batched_tokens"] == 30000
    for own in ("enforce_eager", "cudagraph_capture_sizes", "compilation_config"):
        assert "max_cudagraph_capture_size" not in chosen({own: True})
    everything = {"max_num_batched_tokens": 64, "max_num_seqs": 2, "enforce_eager": True}
    assert chosen(everything) == {}


@pytest.fixture(scope="module")
def locations(tiny_qwen3):
    return resolve_locations(build_model_tree(str(tiny_qwen3)), ["residual.1"])


def test_a_run_of_short_prompts_takes_no_step_more_than_its_tokens_need(tiny_qwen3, locations, tmp_path):
    random = np.random.default_rng(0)
    prompts = [random.integers(10, 1000, int(n)).tolist() for n in random.integers(1, 16, 1600)]
    n_tokens = sum(map(len, prompts))
    run = make_run(tmp_path / "run", prompts, locations, n_units=4)
    spec = EngineSpec(
        run_path=str(run.path),
        model=str(tiny_qwen3),
        locations=("residual.1",),
        layout=run.layout,
        selection=Selection(),
        sampling={"temperature": 0.0},
        max_model_len=512,
        prompt_tokens=n_tokens / len(prompts),
    )
    llm = Llm(spec)
    assert llm.max_step_tokens == CPU_STEP_TOKENS
    assert llm.max_requests == round(2 * CPU_STEP_TOKENS * len(prompts) / n_tokens)
    feeder = Feeder(llm, spec, partial(read_planned, run.plan, unit_rows=run.layout.unit_rows))
    with Committer.open(run) as committer:
        futures = [feeder.submit(Lease(unit=unit, attempt=committer.next_attempt(unit))) for unit in range(4)]
        thread = threading.Thread(target=feeder.run, daemon=True)
        thread.start()
        receipts = [future.result(120) for future in futures]
        feeder.stop()
        thread.join(30)
        llm.close()
        # All steps but the last are full: units do not end in short ones, and requests never run out.
        profile = feeder.stats.profile
        assert profile.n_step_tokens == n_tokens
        assert profile.n_steps == -(-n_tokens // CPU_STEP_TOKENS)
        committer.publish([receipt.storage for receipt in receipts if isinstance(receipt, Receipt) and receipt.storage])
        committer.finalise()
    reader = StoreReader(run)
    for invoke in range(0, len(prompts), 97):
        assert reader.prompt(invoke).token_ids.tolist() == prompts[invoke]
