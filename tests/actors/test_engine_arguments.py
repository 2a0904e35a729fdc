"""What would break the attribution of rows is refused by name, before anything starts."""

from __future__ import annotations

import pytest

from actors.worker.llm import EngineArgumentError, check_engine_arguments
from harvest.config import parse_config
from harvest.errors import ConfigError
from harvest.planning import make_plan

REFUSED = [
    ("enable_prefix_caching", True),
    ("speculative_config", {"method": "ngram", "num_speculative_tokens": 2}),
    ("enable_dbo", True),
    ("kv_sharing_fast_prefill", True),
    ("prefill_context_parallel_size", 2),
    ("enable_prompt_embeds", True),
    ("pipeline_parallel_size", 2),
    ("data_parallel_size", 2),
    ("compilation_config", {"pass_config": {"enable_sp": True}}),
    ("worker_cls", "mine.Worker"),
    ("tensor_parallel_size", 2),
    ("max_model_len", 100),
    ("enable_lora", True),
    ("generation_config", "vllm"),
]


@pytest.mark.parametrize(("name", "value"), REFUSED, ids=[name for name, _ in REFUSED])
def test_an_argument_under_which_rows_would_be_wrong_is_refused_by_name(name, value):
    with pytest.raises(EngineArgumentError, match=rf"engine\.vllm\.{name}.*: .+"):
        check_engine_arguments({name: value})


def test_what_says_no_to_such_a_feature_is_allowed():
    check_engine_arguments(
        {
            "enable_prefix_caching": False,
            "speculative_config": None,
            "pipeline_parallel_size": 1,
            "prefill_context_parallel_size": 1,
            "compilation_config": {"mode": 0},
        }
    )


def test_a_plan_refuses_it_too(tiny_qwen3, demo_text, tmp_path):
    config = parse_config(
        {
            "model": {"name": str(tiny_qwen3)},
            "dataset": {"path": str(demo_text)},
            "capture": {"locations": ["residual.1"]},
            "store": {"path": str(tmp_path / "run")},
            "engine": {"vllm": {"enable_prefix_caching": True}},
        }
    )
    with pytest.raises(ConfigError, match=r"engine\.vllm\.enable_prefix_caching = True .* pass through no forward"):
        make_plan(config, lambda line: None)
    assert not (tmp_path / "run").exists()
