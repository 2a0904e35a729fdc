"""How much an engine's step holds where the user does not say: full steps within the ring's and the device's memory.

vLLM's own defaults depend on how it is called; called as a library it takes 2048 tokens and 128 requests a step, which
leaves a GPU half idle, and steps of short prompts short.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# A GPU's layers are busy enough from here on; a CPU's caches are full sooner.
GPU_STEP_TOKENS = 8192
CPU_STEP_TOKENS = 2048
MIN_STEP_TOKENS = 256
# Steps that the ring holds at least: one is computed while others are written. The feeder refuses less than two.
STEPS_IN_RING = 4
# vLLM's own number. Fewer requests would save nothing.
MIN_REQUESTS = 128
# Each request costs logits of the whole vocabulary while vLLM measures its memory: 0.6 GB at 1024 x 152,000 floats.
MAX_REQUESTS = 1024
# Answers grow by one token of each request a step; beyond this many, KV cache is what limits them.
GENERATING_REQUESTS = 256
# A step of random prompts holds many more than the mean when they happen to be short.
SPREAD = 2
UNKNOWN_PROMPT_TOKENS = 64
# What vLLM captures with MIN_REQUESTS: more requests must not mean more graphs, of which runs of prompts use none.
CAPTURED_ROWS = 256


def step_arguments(
    vllm: Mapping[str, Any],
    *,
    on_cpu: bool,
    generates: bool,
    row_bytes: int,
    ring_bytes: int,
    prompt_tokens: float,
    max_model_len: int | None,
) -> dict[str, Any]:
    """Engine arguments under vLLM's names, for those of them that the user's `vllm` leaves open.

    Args:
        vllm: the user's engine arguments.
        on_cpu: the engine runs on a CPU.
        generates: requests go on after their prompt.
        row_bytes: bytes of one token's rows at all locations.
        ring_bytes: host memory for rows on their way to disk.
        prompt_tokens: mean length of a prompt, 0 if it is not known.
        max_model_len: longest sequence in tokens.
    """
    tokens = vllm.get("max_num_batched_tokens")
    if tokens is None:
        tokens = _step_tokens(CPU_STEP_TOKENS if on_cpu else GPU_STEP_TOKENS, row_bytes, ring_bytes)
        tokens = max(tokens, vllm.get("max_num_seqs") or 0)
        if vllm.get("enable_chunked_prefill") is False:
            tokens = max(tokens, max_model_len or 0)
    if generates:
        requests = MIN_REQUESTS if on_cpu else GENERATING_REQUESTS
    else:
        filled = round(SPREAD * tokens / (prompt_tokens or UNKNOWN_PROMPT_TOKENS))
        requests = min(max(filled, MIN_REQUESTS), MAX_REQUESTS)
    chosen = {"max_num_batched_tokens": tokens, "max_num_seqs": min(requests, tokens)}
    captures_itself = {"compilation_config", "cudagraph_capture_sizes", "enforce_eager"} & vllm.keys()
    if not (on_cpu or generates or captures_itself):
        chosen["max_cudagraph_capture_size"] = CAPTURED_ROWS
    return {name: value for name, value in chosen.items() if vllm.get(name) is None}


def _step_tokens(wanted: int, row_bytes: int, ring_bytes: int) -> int:
    """A power of two."""
    fits = ring_bytes // (STEPS_IN_RING * row_bytes) if row_bytes else wanted
    if fits < MIN_STEP_TOKENS:
        # A ring too small for two of these is refused by the feeder, with what to do.
        return MIN_STEP_TOKENS
    return min(wanted, 1 << (int(fits).bit_length() - 1))
