"""Engines that serve blocks: what they refuse, when they start, whom they admit, how they end."""

# mypy: disable-error-code="attr-defined, assignment, var-annotated, unreachable, unused-ignore"

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from harvest import VLLM, BlockError
from tests.blocks.conftest import CPU

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ({"enable_chunked_prefill": True}, "enable_chunked_prefill=False"),
        ({"enable_prefix_caching": True}, "enable_prefix_caching=False"),
        ({"async_scheduling": True}, "async_scheduling=False"),
        ({"speculative_config": {"method": "ngram"}}, "speculative decoding"),
        ({"pipeline_parallel_size": 2}, "pipeline"),
        ({"worker_cls": "x.Y"}, "own worker"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arguments_that_contradict_blocks_are_refused_at_once(argument: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        VLLM("no-such-model", **argument)


def test_importing_harvest_imports_no_engine() -> None:
    program = "import sys, harvest; print([name for name in ('torch', 'vllm', 'ray') if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_requests_wait_until_their_whole_life_fits_and_nothing_is_preempted(tiny_qwen3: Path) -> None:
    """20 blocks of KV (32 tokens each), four requests that grow from 4 blocks to 6: three fit for life."""
    from vllm.v1.core.sched.scheduler import Scheduler

    from actors.worker.blocks.scheduler import BlockScheduler

    preempted: list[str] = []
    running: list[int] = []
    before = Scheduler._preempt_request
    schedule = BlockScheduler.schedule

    def note(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        preempted.append(request.request_id)
        return before(self, request, *args, **kwargs)

    def count(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = schedule(self, *args, **kwargs)
        running.append(len(self.running))
        return output

    def block(model: Any, tracer: Any) -> list[int]:
        return [len(model.model.layers[1].output[0]) for _ in tracer.all()]

    prompts = [[5 + number] * 100 for number in range(4)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "_preempt_request", note)
        patch.setattr(BlockScheduler, "schedule", count)
        with VLLM(tiny_qwen3, num_gpu_blocks_override=21, block_size=32, **CPU) as model:
            results = model.run(block, prompts, max_tokens=90, **GREEDY)
            assert [result.value for result in results] == [[100] + [1] * 89] * 4
            assert preempted == []
            assert max(running) == 3

            # Without the gate the same load preempts, and the block is told so instead of seeing rows twice.
            patch.setattr(BlockScheduler, "_n_admissible", lambda self: 99)
            results = model.run(block, prompts, max_tokens=90, errors="return", **GREEDY)
            assert preempted
            assert any(result.error is not None for result in results)


def test_long_prompts_over_the_step_budget_wait_and_are_read_whole(tiny_qwen3: Path) -> None:
    with VLLM(tiny_qwen3, max_num_batched_tokens=512, **CPU) as model:
        results = model.run(lambda model: len(model.model.layers[1].output[0]), [[9] * 400] * 6, max_tokens=2)
    assert [result.value for result in results] == [400] * 6


def test_the_first_trace_starts_the_engine_and_the_tree_stays(tiny_qwen3: Path) -> None:
    model = VLLM(tiny_qwen3, **CPU)
    layer = model.model.layers[1]
    text = repr(model)
    assert not model.dispatched
    with model.trace("Paris is in", max_tokens=1, **GREEDY):
        rows = layer.output[0].shape.save()
    assert model.dispatched
    assert tuple(rows) == (6, 128)
    assert repr(model) == text
    model.close()
    assert not model.dispatched


def test_clone_reads(tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NNSIGHT_VLLM_CLONE_READS", "1")
    with VLLM(tiny_qwen3, **CPU) as model:
        layer = model.model.layers[1]
        with model.trace("Paris is in", max_tokens=1, **GREEDY):
            layer.mlp.output[:] = 0
            lost = model.model.layers[2].input_layernorm.input.save()
        with model.trace("Paris is in", max_tokens=1, **GREEDY):
            out = layer.mlp.output
            out[:] = 0
            layer.mlp.output = out
            landed = model.model.layers[2].input_layernorm.input.save()
    assert lost.abs().max() > 0
    assert landed.abs().max() == 0


def test_saving_too_much_fails_its_request_with_the_limit(tiny_qwen3: Path) -> None:
    with VLLM(tiny_qwen3, max_saved_bytes=10_000, **CPU) as model:
        with pytest.raises(BlockError, match="10,000 bytes") as caught, model.trace(max_tokens=1, **GREEDY) as tracer:
            with tracer.invoke([5] * 30):
                kept = model.model.layers[1].output[0].save()
            with tracer.invoke([5] * 10):
                kept = model.model.layers[1].output[0].save()
        assert caught.value.invoke == 0
        assert kept.shape == (10, 128)


def test_lora_requests_go_through(tiny_qwen3: Path) -> None:
    with VLLM(tiny_qwen3, **CPU) as model:
        with pytest.raises(Exception, match="LoRA is not enabled"):
            model.run(lambda model: None, [5, 6], max_tokens=1, lora_request=_adapter())
        assert torch.is_tensor(model.run(lambda model: model.logits, [5, 6], max_tokens=1).value)


def _adapter() -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest("none", 1, "/nonexistent")
