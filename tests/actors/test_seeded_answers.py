"""Answers drawn with a seed on a CPU: prompts that do not fit a step are not cut, since vLLM's engine would break."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from actors.selection import Selection
from actors.worker.llm import EngineArgumentError, engine_arguments
from actors.worker.locations import resolve_locations
from actors.worker.tree import build_model_tree
from tests.harness import engine, harvest, make_run

SAMPLING = {"temperature": 1.0, "seed": 3, "ignore_eos": True}


def test_more_prompts_than_a_step_holds(tiny_qwen3, tmp_path):
    random = np.random.default_rng(0)
    # 300 tokens do not divide a step of 512: every second prompt would be cut.
    prompts = [random.integers(5, 1000, 300).tolist() for _ in range(6)]
    locations = resolve_locations(build_model_tree(str(tiny_qwen3)), ["residual.3"])
    selection = Selection(source="both", exact_length=True)
    answers = []
    for number in range(2):
        run = make_run(tmp_path / str(number), prompts, locations, selection=selection, max_tokens=4)
        vllm = {"max_num_batched_tokens": 512}
        options: dict[str, Any] = {"selection": selection, "sampling": SAMPLING, "generates": True, "vllm": vllm}
        with engine(run, tiny_qwen3, locations, **options) as feeder:
            reader = harvest(run, feeder)
            spec = feeder._spec
        answers.append([reader.prompt(invoke).token_ids.tolist() for invoke in range(len(prompts))])
    assert answers[0] == answers[1]
    assert [ids[:300] for ids in answers[0]] == prompts
    with pytest.raises(EngineArgumentError, match=r"leave out capture\.generation\.seed"):
        engine_arguments(replace(spec, vllm={"enable_chunked_prefill": True}), on_cpu=True)
    assert "enable_chunked_prefill" not in engine_arguments(spec, on_cpu=False)
