"""`tracer.cache`: modules recorded at every step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from actors.worker.blocks.errors import LocationError, OutOfOrderError
from harvest import save
from tests.blocks.toy import ToyEngine, ToyModel, ToyRequest, rows, run_one


def test_chosen_modules_at_every_step_also_after_the_block() -> None:
    def block(model: Any, tracer: Any) -> None:
        save(tracer.cache(modules=[model.layers[0], "layers.1.inner"]), "cache")

    model = ToyModel(reuse=True)
    cache = run_one(block, model=model, n_steps=3).saves["cache"]
    assert sorted(cache) == ["layers.0", "layers.1.inner"]
    assert [len(step[0]) for step in cache["layers.0"].output] == [3, 1, 1]
    assert torch.equal(cache["layers.0"].output[0][0], rows([1, 2, 3]))
    assert torch.equal(cache["layers.1.inner"].output[2], rows([5]))
    assert cache["layers.0"][0].inputs is None
    assert model.layers[0].forward is not None


def test_own_rows_of_each_request() -> None:
    def block(model: Any, tracer: Any) -> Any:
        return tracer.cache(modules=[model.layers[2].inner])

    first, second = ToyEngine().run(ToyRequest(block, n_prompt=2, n_steps=1), ToyRequest(block, n_steps=2))
    assert torch.equal(first.value["layers.2.inner"].output, rows([3, 4]))
    assert torch.equal(second.value["layers.2.inner"].output[0], rows([103, 104, 105]))
    assert torch.equal(second.value["layers.2.inner"].output[1], rows([106]))


def test_inputs_on_request_and_edits_as_the_next_module_gets_them() -> None:
    def block(model: Any, tracer: Any) -> Any:
        cache = tracer.cache(modules=[model.layers[0].inner], include_inputs=True, dtype=torch.float64)
        model.layers[0].inner.output[:] = 7
        return cache

    (step,) = run_one(block, n_steps=1).value["layers.0.inner"]
    assert torch.equal(step.output, rows([7, 7, 7]).double())
    (argument,), named = step.inputs
    assert torch.equal(argument, rows([0, 1, 2]).double())
    assert named == {}


def test_inputs_without_outputs() -> None:
    def block(model: Any, tracer: Any) -> Any:
        return tracer.cache(modules=[model.layers[0]], include_output=False, include_inputs=True)

    recorded = run_one(block, n_steps=2).value["layers.0"]
    assert len(recorded) == 2
    assert recorded[1].output is None


def test_all_modules() -> None:
    def block(model: Any, tracer: Any) -> Any:
        return tracer.cache()

    cache = run_one(block, n_steps=1).value
    assert {"", "layers.0", "layers.1.inner", "layers.2.shared"} <= set(cache)
    assert "unused" not in cache


def test_a_module_that_is_past_or_unknown_is_refused() -> None:
    def late(model: Any, tracer: Any) -> Any:
        model.layers[1].output  # noqa: B018
        return tracer.cache(modules=[model.layers[0]])

    with pytest.raises(OutOfOrderError, match="open the cache first"):
        run_one(late)
    with pytest.raises(LocationError, match="no module 'layers.9'"):
        run_one(lambda model, tracer: tracer.cache(modules=["layers.9"]))


def test_nothing_records_on_when_the_request_is_over() -> None:
    engine = ToyEngine()
    engine.run(ToyRequest(lambda model, tracer: tracer.cache()))
    assert not any(site.recorders for sites in engine.runtime._sites.values() for site in (sites.input, sites.output))
