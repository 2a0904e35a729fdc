"""Plain vLLM engines for tests, one at a time in a process.

All in-process engines share vLLM's process-wide parallel groups, and an engine that is shut down (or collected as
garbage, whenever that happens) takes the groups with it. So an engine is closed by name before the next one opens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def open_engine(model: Path, **arguments: Any) -> Iterator[Any]:
    """A `vllm.LLM` on `model` (eager, float32, no prefix caching unless `arguments` say so), closed at the end."""
    from vllm import LLM

    settings = {
        "dtype": "float32",
        "enable_prefix_caching": False,
        "enforce_eager": True,
        "max_model_len": 512,
        "seed": 0,
        **arguments,
    }
    llm = LLM(model=str(model), **settings)
    try:
        yield llm
    finally:
        close_engine(llm)


def close_engine(llm: Any) -> None:
    """Shut an in-process `vllm.LLM` down now; after that its garbage collection touches no other engine."""
    llm.llm_engine.engine_core.shutdown()
