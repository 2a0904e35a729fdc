"""The attention pattern, rebuilt from queries and keys: no attention kernel ever forms it, so it is no location."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def attention_pattern(
    queries: Tensor,
    keys: Tensor,
    attention: Any = None,
    *,
    head_size: int | None = None,
    scale: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Causal attention probabilities, float32 `[heads, queries, keys]`.

        q, k, v = layer.self_attn.attn.inputs[0]
        pattern = attention_pattern(q, k, layer.self_attn.attn)

    Args:
        queries: `[queries, heads * head_size]`, as the kernel gets them (rotated, normed).
        keys: `[keys, kv_heads * head_size]`. The queries are the last positions of the keys: on a decode step, keep
            the keys of earlier steps and put them in front.
        attention: the kernel's module; gives what is not given by name.
        head_size: width of a head.
        scale: factor of the scores; 1 / sqrt(head_size) by default.
        sliding_window: how many positions a query sees, its own counted; None for all before it.
        softcap: scores become softcap * tanh(score / softcap), as Gemma 2 has it.

    Raises:
        ValueError: the widths are no whole number of heads, or there are more queries than keys.
    """
    import torch

    if attention is not None:
        head_size = head_size or attention.head_size
        scale = scale or getattr(attention.impl, "scale", None)
        sliding_window = sliding_window or attention.sliding_window
        softcap = softcap or getattr(attention.impl, "logits_soft_cap", None)
    if head_size is None:
        raise ValueError("give the attention module or head_size")
    n_queries, n_keys = len(queries), len(keys)
    if queries.shape[-1] % head_size or keys.shape[-1] % head_size:
        raise ValueError(
            f"queries of width {queries.shape[-1]} and keys of width {keys.shape[-1]} are no whole heads of {head_size}"
        )
    if n_queries > n_keys:
        raise ValueError(f"{n_queries} queries and {n_keys} keys: a query's own key must be among the keys")
    q_HQd = queries.reshape(n_queries, -1, head_size).transpose(0, 1).float()
    k_GKd = keys.reshape(n_keys, -1, head_size).transpose(0, 1).float()
    if len(q_HQd) % len(k_GKd):
        raise ValueError(f"{len(q_HQd)} query heads do not share {len(k_GKd)} key heads evenly")
    # Neighbouring query heads share a key head.
    k_HKd = k_GKd.repeat_interleave(len(q_HQd) // len(k_GKd), dim=0)
    scores_HQK = q_HQd @ k_HKd.transpose(1, 2) * (head_size**-0.5 if scale is None else scale)
    if softcap:
        scores_HQK = softcap * torch.tanh(scores_HQK / softcap)
    at_Q1 = torch.arange(n_keys - n_queries, n_keys, device=queries.device)[:, None]
    at_K = torch.arange(n_keys, device=queries.device)
    hidden_QK = at_K > at_Q1
    if sliding_window:
        hidden_QK |= at_K <= at_Q1 - sliding_window
    return scores_HQK.masked_fill(hidden_QK, float("-inf")).softmax(-1)
