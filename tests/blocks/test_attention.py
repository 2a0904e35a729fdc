"""The rebuilt attention pattern against torch's own attention."""

from __future__ import annotations

import pytest
import torch

from harvest import attention_pattern


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 3])
def test_against_torch(kv_heads: int, window: int | None) -> None:
    torch.manual_seed(0)
    n, heads, size = 9, 4, 8
    q, k, v = torch.randn(n, heads * size), torch.randn(n, kv_heads * size), torch.randn(n, kv_heads * size)
    pattern = attention_pattern(q, k, head_size=size, sliding_window=window)
    distance = torch.arange(n)[:, None] - torch.arange(n)
    seen = (distance >= 0) & (distance < (window or n))
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.view(1, n, heads, size).transpose(1, 2),
        k.view(1, n, kv_heads, size).transpose(1, 2),
        v.view(1, n, kv_heads, size).transpose(1, 2),
        attn_mask=seen,
        enable_gqa=True,
    )[0]
    values = v.view(n, kv_heads, size).transpose(0, 1).repeat_interleave(heads // kv_heads, dim=0)
    assert torch.allclose(pattern @ values, expected, atol=1e-6)
    assert torch.equal(pattern[0] > 0, seen)
    last = attention_pattern(q[-2:], k, head_size=size, sliding_window=window)
    assert torch.allclose(last, pattern[:, -2:])


def test_softcap_and_scale() -> None:
    q, k = torch.randn(3, 8), torch.randn(3, 8)
    scores = torch.tanh(q @ k.T * 0.5 / 2) * 2
    expected = scores.masked_fill(torch.ones(3, 3).triu(1).bool(), float("-inf")).softmax(-1)
    assert torch.allclose(attention_pattern(q, k, head_size=8, scale=0.5, softcap=2.0)[0], expected)


def test_bad_shapes() -> None:
    with pytest.raises(ValueError, match="no whole heads of 8"):
        attention_pattern(torch.zeros(2, 12), torch.zeros(2, 8), head_size=8)
    with pytest.raises(ValueError, match="own key must be among"):
        attention_pattern(torch.zeros(3, 8), torch.zeros(2, 8), head_size=8)
    with pytest.raises(ValueError, match="evenly"):
        attention_pattern(torch.zeros(3, 24), torch.zeros(3, 16), head_size=8)
    with pytest.raises(ValueError, match="head_size"):
        attention_pattern(torch.zeros(3, 24), torch.zeros(3, 16))
