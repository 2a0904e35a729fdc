"""An engine in a Ray actor serves the same blocks."""

# mypy: disable-error-code="attr-defined, assignment, var-annotated, unreachable, unused-ignore"

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harvest import VLLM, BlockError
from harvest.blocks.errors import EngineReplacedError
from tests.blocks.conftest import CPU

pytestmark = pytest.mark.ray
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


def test_blocks_run_in_an_actor(tiny_qwen3: Path, ray_cluster: None) -> None:
    import ray

    with VLLM(tiny_qwen3, ray={"num_cpus": 1}, **CPU) as model:
        with model.trace(max_tokens=3, **GREEDY) as tracer:
            for prompt in ("Paris is in", "The capital of Japan is"):
                with tracer.invoke(prompt):
                    tokens = [].save()
                    rows = model.model.layers[2].output[0].save()
                    for _ in tracer.all():
                        tokens.append(model.samples.item())
                    out = tracer.result.save()
        assert tokens == [list(request.outputs[0].token_ids) for request in out]
        assert [len(value) for value in rows] == [len(request.prompt_token_ids) for request in out]
        assert model.tokenizer.decode(tokens[0]) == out[0].outputs[0].text

        with pytest.raises(BlockError, match="division") as caught, model.trace("Paris is in", max_tokens=1):
            _ = 1 / 0
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        with pytest.raises(Exception, match="maximum context length"):
            model.generate([[5] * 600], max_tokens=1)
        assert model.engine.count_blocks() == [0]

        ray.kill(model.engine._actor)
        with pytest.raises(EngineReplacedError, match="actor died"):
            model.generate("Paris is in", max_tokens=1)
        assert not model.dispatched
