"""The loader on a GPU: batches go there from pinned memory without a wait, while kernels keep the stream busy."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from harvest.loader import RowLoader
from storage.testing import ScriptedRun

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda", 0)], ids=str)
def test_batches_on_the_device_are_those_of_the_host(device, tmp_path):
    script = ScriptedRun(seed=4, n_units=6)
    folder = script.create(tmp_path / "run")
    script.finish(folder)
    small: dict[str, Any] = {"batch_size": 8, "labels": True, "buffer_bytes": 1 << 14, "block_bytes": 1 << 10}
    host = list(RowLoader(folder.path, ["attempt", "residual.1"], **small))
    busy = torch.randn(4096, 4096, device="cuda")
    there = []
    for batch in RowLoader(folder.path, ["attempt", "residual.1"], device=device, dtype=torch.float32, **small):
        # Copies queue behind this; pinned memory that was used again too soon would show.
        busy = torch.nn.functional.normalize(busy @ busy)
        there.append(batch)
    assert len(there) == len(host) > 10
    for mine, other in zip(there, host, strict=True):
        for name, values in other.items():
            assert mine[name].device == torch.device("cuda", 0)
            wanted = values.to(torch.float32) if name in ("attempt", "residual.1") else values
            assert torch.equal(mine[name].cpu(), wanted)
