"""Reductions on a GPU: the same rows as on the CPU, the same bits each time, and no wait of the host."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from actors.worker.reduction import Reductions
from actors.worker.rows import Registration, RowBook
from actors.worker.step import StepRows

pytestmark = pytest.mark.gpu

LENGTHS = (1, 63, 64, 65, 1000, 3000)


def make_steps(chunk: int) -> list[StepRows]:
    """All requests side by side, `chunk` tokens of each in a step."""
    steps = []
    for first in range(0, max(LENGTHS), chunk):
        counts = {f"r{i}": min(chunk, n - first) for i, n in enumerate(LENGTHS) if n > first}
        steps.append(
            StepRows.checked(
                request_ids=tuple(counts),
                starts=np.concatenate([[0], np.cumsum(list(counts.values()))]),
                first_positions=np.full(len(counts), first),
                scheduled=counts,
            )
        )
    return steps


def reduce_all(values: list[torch.Tensor], reduce: str, chunk: int, device: str) -> dict[int, torch.Tensor]:
    """The stored row of each request."""
    book = RowBook()
    reductions = Reductions(reduce, store_dtype=torch.float32, device=torch.device(device))  # type: ignore[arg-type]
    for request, length in enumerate(LENGTHS):
        book.register(
            f"r{request}",
            Registration(
                unit=0, attempt=1, invoke=request, unit_row=request, positions=np.arange(length), reduced=True
            ),
        )
    stored: dict[int, torch.Tensor] = {}
    inputs = [
        torch.cat(
            [values[int(name[1:])][f : f + chunk] for name, f in zip(s.request_ids, s.first_positions, strict=True)]
        )
        for s in make_steps(chunk)
    ]
    inputs = [each.to(device) for each in inputs]
    torch.cuda.synchronize()
    for step, rows in zip(make_steps(chunk), inputs, strict=True):
        take = book.take(step)
        assert take is not None
        # An operation for which the host waits raises.
        torch.cuda.set_sync_debug_mode("error" if device == "cuda" else "default")
        try:
            reducer = reductions.begin_step(take)
            assert reducer is not None
            ended = reductions.end_step("here", reducer.reduce(rows), reducer)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        stored.update(zip(take.segments.unit_rows.tolist(), ended.cpu(), strict=True))
    return stored


@pytest.mark.parametrize("reduce", ["mean", "max"])
@pytest.mark.parametrize("chunk", [16, 512, 4096])
def test_rows_are_those_of_the_cpu_without_a_wait(reduce: str, chunk: int) -> None:
    generator = torch.Generator().manual_seed(3)
    values = [torch.randn(n, 256, generator=generator).bfloat16() for n in LENGTHS]
    first = reduce_all(values, reduce, chunk, "cuda")
    again = reduce_all(values, reduce, chunk, "cuda")
    host = reduce_all(values, reduce, chunk, "cpu")
    assert sorted(first) == sorted(host) == list(range(len(LENGTHS)))
    for request, rows in enumerate(values):
        assert torch.equal(first[request], again[request])
        expected = rows.double().mean(0) if reduce == "mean" else rows.double().amax(0)
        for found in (first[request], host[request]):
            torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
