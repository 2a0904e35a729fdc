"""What blocks send back: device tensors that come to the host together."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from actors.worker.blocks import wire
from actors.worker.blocks.errors import SavedTooLargeError
from actors.worker.blocks.wire import pack, unpack


@pytest.fixture(autouse=True)
def host_counts_as_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "_UNGATHERED_DEVICES", ())


def send(value: Any, **options: Any) -> Any:
    return unpack(pack(value, gather=True, **options), lambda reference: reference)


def test_gathered_tensors_come_back_equal_in_all_dtypes_shapes_and_strides() -> None:
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    sent: dict[str, Any] = {
        "rows": [base[1:2], base[:, 2], base.T, base[0, 0]],
        "half": base.to(torch.bfloat16),
        "ids": torch.tensor([[3], [4]]),
        "flags": base > 7,
        "complex": torch.complex(base, -base).conj(),
        "empty": torch.empty(0, 5),
        "weight": torch.nn.Parameter(base),
    }
    packed = pack(sent, gather=True)
    assert packed.gathered is not None and len(packed.gathered.specs) == 9
    got = send(sent)
    for name in ("half", "ids", "flags", "complex", "empty"):
        assert got[name].dtype == sent[name].dtype
        assert torch.equal(got[name], sent[name])
    assert all(torch.equal(mine, other) for mine, other in zip(got["rows"], sent["rows"], strict=True))
    assert torch.equal(got["weight"], base)


def test_a_tensor_met_twice_stays_one_and_others_share_no_memory() -> None:
    twice, other = torch.ones(3), torch.ones(3)
    first, second, third = send([twice, twice, other])
    assert first is second
    third += 1
    assert first.tolist() == [1, 1, 1]


def test_large_tensors_travel_alone() -> None:
    large = torch.zeros(wire.GATHERED_BYTES // 4)
    packed = pack([large, torch.ones(2)], gather=True, keep_buffers=True)
    assert packed.gathered is not None and len(packed.gathered.specs) == 1
    assert len(packed.buffers) == 1


def test_gathered_bytes_count_towards_the_limit() -> None:
    with pytest.raises(SavedTooLargeError, match="more than 100 bytes"):
        send([torch.zeros(20), torch.zeros(20)], limit_bytes=100)
