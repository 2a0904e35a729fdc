"""Layers in which no block waits are launched from recordings: the same values, and the same rules for blocks.

On a CPU a recorder that notes operations stands for CUDA graphs; tests/blocks/test_gpu.py has the real ones.
"""

# mypy: disable-error-code="attr-defined, assignment, var-annotated, unreachable, unused-ignore"

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.worker.blocks import runner
from actors.worker.blocks.graph_recording import RecordingError
from actors.worker.blocks.layer_graphs import _why_not
from harvest import VLLM, BlockError
from tests.blocks.conftest import CPU
from tests.blocks.tape import TapeRecorder

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13], [14], [15, 16, 17]]


@pytest.fixture(scope="module")
def model(tiny_qwen3: Path) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "make_recorder", TapeRecorder)
        with VLLM(tiny_qwen3, dispatch=True, **CPU) as opened:
            yield opened
            assert opened.engine.count_blocks() == [0]


def graphs_of(model: Any) -> Any:
    return model.engine._engine.model_executor.driver_worker.worker.model_runner.blocks.graphs


@contextmanager
def module_by_module(model: Any) -> Iterator[None]:
    """No layer is launched from a recording meanwhile."""
    graphs = graphs_of(model)
    recorder, graphs.recorder = graphs.recorder, None
    try:
        yield
    finally:
        graphs.recorder = recorder


def reads_one_layer(model: Any, tracer: Any) -> list[Any]:
    return [sum(model.model.layers[1].output) for _ in tracer.all()]


def reads_inside(model: Any, tracer: Any) -> list[Any]:
    return [(model.model.layers[0].self_attn.o_proj.output, model.model.layers[2].mlp.output) for _ in tracer.all()]


def edits_between_and_inside(model: Any, tracer: Any) -> list[Any]:
    kept = []
    for step in tracer.all():
        model.model.layers[0].output[0][:] *= 0.5
        if step % 2:
            model.model.layers[1].mlp.output = torch.ones_like(model.model.layers[1].mlp.output)
        kept.append(model.model.layers[2].output[1])
        kept.append(model.logits)
    return kept


def records_everything(model: Any, tracer: Any) -> Any:
    with tracer.cache(modules=[model.model.layers[1].mlp, model.model.layers[2]]) as cache:
        pass
    return {path: [step.output for step in steps] for path, steps in cache.items()}


def shifts_positions(model: Any, tracer: Any) -> list[Any]:
    kept = []
    for _ in tracer.all():
        positions = model.model.layers[1].inputs[0][0]
        positions += 3
        kept.append(model.model.layers[2].output[0])
    return kept


@pytest.mark.parametrize(
    "block",
    [reads_one_layer, reads_inside, edits_between_and_inside, shifts_positions],
    ids=lambda block: block.__name__,
)
def test_values_are_those_of_module_by_module(model: Any, block: Any) -> None:
    sampling = {**GREEDY, "max_tokens": 6}
    with module_by_module(model):
        expected = model.run(block, PROMPTS, **sampling)
    before = graphs_of(model).n_replays
    for _ in range(3):  # prepare, record, replay
        got = model.run(block, PROMPTS, **sampling)
    assert graphs_of(model).n_replays > before
    assert not graphs_of(model).refusals
    assert [result.output.outputs[0].token_ids for result in got] == [
        result.output.outputs[0].token_ids for result in expected
    ]
    for result, wanted in zip(got, expected, strict=True):
        torch.testing.assert_close(result.value, wanted.value, rtol=1e-5, atol=1e-5)


def test_a_layer_reads_what_the_layer_before_it_wrote_without_a_copy(model: Any) -> None:
    for _ in range(2):
        model.run(reads_one_layer, PROMPTS, max_tokens=4, **GREEDY)
    layers = list(graphs_of(model)._layers.values())
    for before, after in itertools.pairwise(layers):
        given, taken = before._recordings[8].output, after._recordings[8].inputs
        assert all(any(mine is other for other in taken) for mine in given)


def test_requests_that_end_at_different_steps(model: Any) -> None:
    """Rows of one bucket shrink from step to step, and move."""

    def run() -> list[Any]:
        with model.trace(**GREEDY) as tracer:
            for index, prompt in enumerate(PROMPTS):
                with tracer.invoke(prompt, max_tokens=3 + 2 * index):
                    kept = [].save()
                    for _ in tracer.all():
                        kept.append(model.model.layers[1].output[0])
        return kept

    with module_by_module(model):
        expected = run()
    for _ in range(3):
        got = run()
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_a_location_inside_of_a_launched_layer_counts_as_passed(model: Any) -> None:
    def late(model: Any, tracer: Any) -> None:
        for step in tracer.all():
            model.model.layers[2].output  # noqa: B018
            if step == 4:
                model.model.layers[1].mlp.output  # noqa: B018

    before = graphs_of(model).n_replays
    for _ in range(3):
        with pytest.raises(BlockError, match=r"gone past model.layers.1.mlp.output"):
            model.run(late, PROMPTS[0], max_tokens=8, **GREEDY)
    assert graphs_of(model).n_replays > before


def test_operations_inside_of_a_layer_are_reached_once_they_are_asked_for(model: Any) -> None:
    def block(model: Any, tracer: Any) -> list[Any]:
        return [model.model.layers[3].mlp.source.self_act_fn_0.output for _ in tracer.all()]

    model.run(reads_one_layer, PROMPTS, max_tokens=4, **GREEDY)
    got = model.run(block, PROMPTS, max_tokens=4, **GREEDY)
    with module_by_module(model):
        expected = model.run(block, PROMPTS, max_tokens=4, **GREEDY)
    for result, wanted in zip(got, expected, strict=True):
        torch.testing.assert_close(result.value, wanted.value, rtol=1e-5, atol=1e-5)


def test_a_cache_is_filled_inside_of_layers(model: Any) -> None:
    def run() -> Any:
        with model.trace(PROMPTS[0], max_tokens=5, **GREEDY) as tracer:
            cache = tracer.cache(modules=[model.model.layers[1].mlp]).save()
        return [step.output for step in cache["model.layers.1.mlp"]]

    for _ in range(3):
        got = run()
    with module_by_module(model):
        expected = run()
    assert len(got) == 5
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_requests_without_blocks_use_recordings_too(model: Any) -> None:
    sampling = {**GREEDY, "max_tokens": 6}
    with module_by_module(model):
        expected = model.generate(PROMPTS, **sampling)
    before = graphs_of(model).n_replays
    for _ in range(3):
        got = model.generate(PROMPTS, **sampling)
    assert graphs_of(model).n_replays > before
    assert [output.outputs[0].token_ids for output in got] == [output.outputs[0].token_ids for output in expected]


def test_hooks_of_pytorch_inside_of_a_layer_are_called(model: Any) -> None:
    for _ in range(2):
        model.run(reads_one_layer, PROMPTS[0], max_tokens=4, **GREEDY)
    seen = []
    handle = model.engine.module_tree().model.layers[2].mlp.register_forward_hook(lambda *_: seen.append(1))
    try:
        before = graphs_of(model).n_replays
        model.run(reads_one_layer, PROMPTS[0], max_tokens=4, **GREEDY)
    finally:
        handle.remove()
    assert len(seen) == 4
    assert graphs_of(model).n_replays > before, "the other layers"


class _Failing(TapeRecorder):
    """Does the work, then says that it cannot be repeated."""

    def record(self, run: Any, rows: Any) -> Any:
        super().record(run, rows)
        raise RecordingError("it is Tuesday")


def test_a_layer_whose_recording_fails_runs_module_by_module_with_what_it_was_given(model: Any) -> None:
    graphs = graphs_of(model)
    with module_by_module(model):
        expected = model.run(reads_one_layer, PROMPTS, max_tokens=6, **GREEDY)
    recorder, graphs.recorder = graphs.recorder, _Failing()
    for layer in graphs._layers.values():
        layer.forget()
    try:
        got = model.run(reads_one_layer, PROMPTS, max_tokens=6, **GREEDY)
        assert set(graphs.refusals.values()) == {"it is Tuesday"}
    finally:
        graphs.recorder = recorder
        for layer in graphs._layers.values():
            layer.refusal = ""
    for result, wanted in zip(got, expected, strict=True):
        torch.testing.assert_close(result.value, wanted.value, rtol=1e-5, atol=1e-5)


def test_layers_that_are_not_recorded_say_why(model: Any) -> None:
    decoder = model.engine.module_tree().model
    layer = decoder.layers[0]
    attention = layer.self_attn.attn
    assert _why_not(layer, [decoder], frozenset([id(attention)])) == ""
    assert _why_not(layer, [], frozenset([id(attention)])) == "vLLM does not compile this model"
    assert _why_not(layer, [decoder], frozenset()) == "it has no attention"
    both = frozenset([id(attention), id(layer.mlp)])
    assert _why_not(layer, [decoder], both) == f"it has Attention, {type(layer.mlp).__name__}"
