"""What a failing block does, and what blocks leave behind, on a toy model."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from actors.worker.blocks.errors import (
    BlockTimeoutError,
)
from harvest import save
from tests.blocks.toy import ToyEngine, ToyRequest, rows

# -- failing ---------------------------------------------------------------------------------------------------------


def test_an_error_names_file_line_and_location_and_leaves_the_others() -> None:
    def block(model: Any, tracer: Any) -> None:
        for step in tracer.all():
            model.layers[1].output  # noqa: B018
            if step == 1:
                raise KeyError("broken")

    bad, good = ToyRequest(block, n_steps=6), ToyRequest(lambda model, tracer: list(tracer.all()), n_steps=4)
    failed, fine = ToyEngine().run(bad, good)
    failure = failed.failure
    assert failure is not None
    assert isinstance(failure.error, KeyError)
    assert failure.file == __file__
    assert failure.text == 'raise KeyError("broken")'
    assert (failure.location, failure.step) == ("layers.1.output", 1)
    assert len(bad.seen) == 2
    assert fine.value == [0, 1, 2, 3]


def test_edits_before_an_error_in_the_same_visit_do_not_land() -> None:
    def block(model: Any) -> None:
        model.layers[0].inner.output[:] = 99
        raise ValueError

    request = ToyRequest(block)
    ToyEngine().run(request)
    assert torch.equal(request.seen[0], rows([6, 7, 8]))


def test_leaving_the_process_is_an_error_of_the_request() -> None:
    def block(model: Any) -> None:
        raise SystemExit(3)

    (outcome,) = ToyEngine().run(ToyRequest(block))
    assert outcome.failure is not None
    assert isinstance(outcome.failure.error, SystemExit)


def test_interrupting_reaches_the_caller() -> None:
    def block(model: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ToyEngine().run(ToyRequest(block))
    assert not torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled()


def test_a_block_that_runs_away_is_stopped() -> None:
    def block(model: Any) -> None:
        while True:
            try:
                while True:
                    pass
            except ZeroDivisionError:
                pass

    begin = time.monotonic()
    bad, good = ToyRequest(block), ToyRequest(lambda model: model.layers[0].output[0])
    failed, fine = ToyEngine(block_time_limit_s=0.2).run(bad, good)
    assert time.monotonic() - begin < 20
    assert failed.failure is not None
    with pytest.raises(BlockTimeoutError, match=r"0.2 s"):
        raise failed.failure.error
    assert failed.failure.line is not None
    assert torch.equal(fine.value, rows([101, 102, 103]))


def test_what_cannot_travel_is_named() -> None:
    def block(model: Any) -> None:
        save((n for n in range(3)), "generator")
        save(torch.ones(2), "tensor")

    (outcome,) = ToyEngine().run(ToyRequest(block))
    assert outcome.failure is not None
    assert "generator" in str(outcome.failure.error)
    assert outcome.saves["tensor"].tolist() == [1, 1]


def test_a_saved_module_is_refused() -> None:
    (outcome,) = ToyEngine().run(ToyRequest(lambda model: model.layers[0]))
    assert outcome.failure is not None
    assert "save its value" in str(outcome.failure.error)


class NeedsTwo(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} {two}")


def test_an_error_that_cannot_be_rebuilt_keeps_its_name_and_text() -> None:
    def block(model: Any) -> None:
        raise NeedsTwo(1, 2)

    (outcome,) = ToyEngine().run(ToyRequest(block))
    assert outcome.failure is not None
    assert str(outcome.failure.error) == "NeedsTwo: 1 2"


def test_too_much_saved_is_an_error_with_the_limit() -> None:
    (outcome,) = ToyEngine().run(ToyRequest(lambda model: torch.zeros(1 << 19)))
    assert outcome.failure is not None
    assert "1,048,576 bytes" in str(outcome.failure.error)


# -- modes and leftovers ---------------------------------------------------------------------------------------------


def test_grad_and_inference_modes_are_the_blocks_own() -> None:
    def block(model: Any) -> Any:
        with torch.enable_grad():
            before = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
            model.layers[0].output  # noqa: B018
            after = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        return before, after, (torch.is_grad_enabled(), torch.is_inference_mode_enabled())

    def plain(model: Any) -> Any:
        model.layers[1].output  # noqa: B018
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    first, second = ToyEngine().run(ToyRequest(block), ToyRequest(plain))
    assert first.value == ((True, False), (True, False), (False, False))
    assert second.value == (False, False)


def test_dropped_requests_unwind_their_blocks() -> None:
    log: list[str] = []

    class Spy:
        def __reduce__(self) -> Any:
            return (_get_log, ())

    _LOG.append(log)
    spy = Spy()

    def block(model: Any) -> None:
        try:
            model.layers[0].output  # noqa: B018
        finally:
            spy.append("unwound")

    from actors.worker.blocks.wire import BlockCode, pack

    engine = ToyEngine()
    code = BlockCode(code=None, function=block, names={}, filename="", source="")
    engine.runtime.add_request("r0", {"key": "k", "payload": pack(code).head})
    import numpy as np

    from actors.worker.step import StepRows

    engine.runtime.begin_step(StepRows(request_ids=("r0",), starts=np.array([0, 2]), first_positions=np.array([0])))
    engine.runtime.drop(["r0", "unknown"])
    assert log == ["unwound"]
    assert engine.runtime.n_tasks == 0


_LOG: list[list[str]] = []


def _get_log() -> list[str]:
    return _LOG[-1]
