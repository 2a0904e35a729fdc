"""What a client asks about vLLM's settings without importing vLLM itself."""

from __future__ import annotations

import inspect


def sampling_parameter_names() -> frozenset[str]:
    """The keyword arguments of vLLM's SamplingParams."""
    from vllm import SamplingParams

    names = set(inspect.signature(SamplingParams).parameters)
    names |= set(getattr(SamplingParams, "__struct_fields__", ()))
    return frozenset(name for name in names if not name.startswith("_"))
