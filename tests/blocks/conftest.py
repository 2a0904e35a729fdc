"""One engine on the tiny Qwen3 per test module: engines in one process share vLLM's state, so two never coexist."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CPU: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 16}


@pytest.fixture(scope="module")
def model(tiny_qwen3: Path) -> Iterator[Any]:
    from harvest import VLLM

    with VLLM(tiny_qwen3, dispatch=True, **CPU) as opened:
        yield opened
        assert opened.engine.count_blocks() == [0]
