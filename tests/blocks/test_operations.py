"""`.source`: the calls inside a forward as locations, on a toy model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from actors.worker.blocks.errors import (
    LocationError,
)
from tests.blocks.toy import ToyEngine, ToyModel, ToyRequest, rows, run_one


def test_operations_inside_a_forward_can_be_read_and_written() -> None:
    def block(model: Any, tracer: Any) -> Any:
        source = model.layers[1].source
        kept = []
        for step in tracer.iter[:2]:
            kept.append(source.torch_add_0.input)
            if step == 0:
                source.torch_add_0.output = source.torch_add_0.output * 0
            else:
                source.torch_add_0.output[:] = 1
        return kept, dir(source)

    request, other = ToyRequest(block), ToyRequest(lambda model: model.layers[1].output[0])
    outcome, untouched = ToyEngine().run(request, other)
    kept, names = outcome.value
    assert torch.equal(kept[0], rows([1, 2, 3]))
    assert names == ["self_inner_0", "self_shared_0", "torch_add_0", "torch_mul_0"]
    assert torch.equal(request.seen[0], rows([3, 3, 3]))
    assert torch.equal(request.seen[1], rows([4]))
    assert torch.equal(untouched.value, rows([103, 104, 105]))


def test_an_unknown_operation_lists_those_there_are() -> None:
    with pytest.raises(LocationError, match=r"no operation 'nothing_0'.*torch_add_0"):
        run_one(lambda model: model.layers[1].source.nothing_0.output)


def test_a_forward_prints_with_the_names_of_its_operations() -> None:
    from actors.worker.blocks.operations import SourceText

    text = str(SourceText(ToyModel().layers[0]))
    assert "torch_add_0 |     added = torch.add(changed" in text
