"""Blocks on a GPU: vLLM's V2 model runner, and fused kernels that write in place."""

# mypy: disable-error-code="attr-defined, assignment, var-annotated, unreachable, unused-ignore"

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from harvest import VLLM, BlockError, attention_pattern

pytestmark = pytest.mark.gpu
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
PROMPTS = ["Paris is in", "The capital of Japan is", "Berlin is the capital of"]


@pytest.fixture(scope="module")
def model(tiny_qwen3: Path) -> Iterator[Any]:
    with VLLM(
        tiny_qwen3, dispatch=True, dtype="bfloat16", max_model_len=512, max_num_seqs=16, gpu_memory_utilization=0.3
    ) as opened:
        yield opened
        assert opened.engine.count_blocks() == [0]


def test_own_rows_and_steps(model: Any) -> None:
    with model.trace(max_tokens=4, **GREEDY) as tracer:
        for prompt in PROMPTS:
            with tracer.invoke(prompt):
                shapes = [].save()
                for _ in tracer.all():
                    shapes.append((len(model.model.layers[1].output[0]), tuple(model.logits.shape)))
                out = tracer.result.save()
    for kept, request in zip(shapes, out, strict=True):
        assert kept == [(len(request.prompt_token_ids), (1, 1024))] + [(1, (1, 1024))] * 3


def test_what_is_kept_is_a_copy_where_kernels_overwrite(model: Any) -> None:
    with model.trace(PROMPTS[0], max_tokens=1, **GREEDY):
        view = model.model.layers[1].output[1].save()
        copy = model.model.layers[1].output[1].clone().save()
    assert torch.equal(view, copy)
    assert view.device.type == "cpu"


def test_edits_and_forced_samples_land(model: Any) -> None:
    with model.trace(PROMPTS[0], max_tokens=4, **GREEDY) as tracer:
        tokens = [].save()
        for step in tracer.all():
            model.model.layers[1].mlp.output[:] = 0
            zero = model.model.layers[2].input_layernorm.input.abs().max().item().save()
            if step == 1:
                model.samples[:] = 77
            tokens.append(model.samples.item())
        out = tracer.result.save()
    assert zero == 0
    assert tokens[1] == 77
    assert tokens == list(out.outputs[0].token_ids)


def test_logits_decide_what_is_drawn(model: Any) -> None:
    with model.trace(PROMPTS[0], max_tokens=1, **GREEDY) as tracer:
        model.logits[:, 321] = 1e4
        out = tracer.result.save()
    assert list(out.outputs[0].token_ids) == [321]


def test_a_bad_write_fails_its_request_alone_and_early(model: Any) -> None:
    with pytest.raises(BlockError, match="own rows") as caught, model.trace(max_tokens=20, **GREEDY) as tracer:
        with tracer.invoke(PROMPTS[0]):
            model.model.layers[1].mlp.output = torch.zeros(1, 1)
        with tracer.invoke(PROMPTS[1]):
            out = tracer.result.save()
    assert len(caught.value.results[0].output.outputs[0].token_ids) <= 2
    assert len(out.outputs[0].token_ids) == 20


def test_a_captured_tensor_arrives_on_the_device(model: Any) -> None:
    vector = torch.ones(128, dtype=torch.bfloat16)
    with model.trace(PROMPTS[0], max_tokens=1, **GREEDY):
        model.model.layers[1].mlp.output[:] += vector
        kind = vector.device.type.save()
    assert kind == "cuda"


def test_the_attention_pattern(model: Any) -> None:
    layer = model.model.layers[1]
    with model.trace(PROMPTS[1], max_tokens=1, **GREEDY):
        q, k, v = layer.self_attn.attn.inputs[0]
        pattern = attention_pattern(q, k, layer.self_attn.attn)
        values = v.reshape(len(v), -1, 32).repeat_interleave(2, dim=1).float()
        rebuilt = torch.einsum("hqk,khd->qhd", pattern, values).flatten(1).save()
        kernel = layer.self_attn.attn.output.float().save()
    assert torch.allclose(rebuilt, kernel.reshape(rebuilt.shape), atol=3e-2)


def test_layers_launched_as_graphs_give_what_their_modules_give(model: Any) -> None:
    """Eight requests of one row each: nothing is padded, so the kernels are the same and so are the bits."""

    def reads_everywhere(model: Any, tracer: Any) -> list[Any]:
        kept = []
        for step in tracer.all():
            kept.append(model.model.layers[0].output)
            if step % 2:
                kept.append(model.model.layers[1].mlp.output)
            model.model.layers[2].output[0][:] *= 0.5
            kept.append(model.model.layers[3].output)
        return kept

    graphs = model.engine._engine.model_executor.driver_worker.worker.model_runner.blocks.graphs
    prompts = [PROMPTS[index % 3] for index in range(8)]
    sampling = {**GREEDY, "max_tokens": 24}
    recorder, graphs.recorder = graphs.recorder, None
    expected = model.run(reads_everywhere, prompts, **sampling)
    graphs.recorder = recorder
    before = graphs.n_replays
    for _ in range(2):
        got = model.run(reads_everywhere, prompts, **sampling)
    assert not graphs.refusals
    assert graphs.n_replays - before > 100
    for result, wanted in zip(got, expected, strict=True):
        assert result.output.outputs[0].token_ids == wanted.output.outputs[0].token_ids
        torch.testing.assert_close(result.value, wanted.value, rtol=0, atol=0)


def test_padded_graphs_and_shrinking_batches(model: Any) -> None:
    """Requests of different lengths, which end one by one: rows within bf16 rounding of the modules' own."""
    graphs = model.engine._engine.model_executor.driver_worker.worker.model_runner.blocks.graphs

    def run() -> Any:
        with model.trace(**GREEDY) as tracer:
            for index in range(7):
                with tracer.invoke(PROMPTS[index % 3], max_tokens=6 + 3 * index):
                    kept = [].save()
                    for _ in tracer.all():
                        kept.append(model.model.layers[1].output[0].float())
                        model.samples[:] = 40 + index
        return kept

    recorder, graphs.recorder = graphs.recorder, None
    expected = run()
    graphs.recorder = recorder
    for _ in range(3):
        got = run()
    assert not graphs.refusals
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)
