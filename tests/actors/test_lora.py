"""A run's LoRA adapter is in every row: real vLLM with the adapter against weights merged by hand."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from actors.lora import AdapterError, read_adapter
from actors.selection import Selection
from actors.worker.llm import EngineArgumentError, check_engine_arguments
from actors.worker.locations import resolve_locations
from actors.worker.tree import build_model_tree
from harvest.parity import StoredPrompt, compare
from tests.adapters import make_tiny_adapter, write_merged
from tests.harness import engine, harvest, make_run

# Modules that vLLM wraps (o_proj, qkv_proj, gate_up_proj, down_proj, the head), as input and as output, among others.
NAMES = (
    "embed",
    "residual.0",
    "residual.3",
    "q.1",
    "v.2",
    "heads.1",
    "neurons.2",
    "mlp_out.3",
    "model.layers.0.self_attn.qkv_proj.output[0]",
    "model.layers.1.mlp.gate_up_proj.output[0]",
    "model.layers.2.mlp.down_proj.output[0]",
)


@pytest.fixture(scope="module")
def prompts():
    random = np.random.default_rng(2)
    return [random.integers(5, 1000, int(n)).tolist() for n in (1, 3, 40, 97, 180)]


@pytest.fixture(scope="module")
def adapter(tiny_qwen3, tmp_path_factory):
    return make_tiny_adapter(tiny_qwen3, tmp_path_factory.mktemp("adapter") / "lora")


def harvest_all(path, model, names, prompts, *, sampling=None, **changes):
    locations = resolve_locations(build_model_tree(str(model)), names)
    selection = changes.get("selection")
    run = make_run(path, prompts, locations, selection=selection, max_tokens=8 if changes.get("generates") else 1)
    vllm = {"max_num_batched_tokens": 64}
    with engine(run, model, locations, vllm=vllm, sampling=sampling or {"temperature": 0.0}, **changes) as feeder:
        reader = harvest(run, feeder)
        return reader, feeder.stats


def relative_error(a, b):
    return np.linalg.norm(a.astype(np.float64) - b) / np.linalg.norm(b)


BOTH = {
    "selection": Selection(source="both"),
    "generates": True,
    "sampling": {"temperature": 0.0, "ignore_eos": True},
}


@pytest.fixture(scope="module")
def merged(tiny_qwen3, adapter, prompts, tmp_path_factory):
    """The rows of a plain engine on merged weights."""
    folder = tmp_path_factory.mktemp("merged")
    model = write_merged(tiny_qwen3, adapter, folder / "model")
    return harvest_all(folder / "run", model, NAMES, prompts, **BOTH)[0]


def test_rows_with_an_adapter_are_those_of_merged_weights(tiny_qwen3, adapter, merged, prompts, tmp_path):
    applied, _ = harvest_all(tmp_path / "run", tiny_qwen3, NAMES, prompts, lora=str(adapter), **BOTH)
    stored = []
    for invoke in range(len(prompts)):
        got, wanted = applied.prompt(invoke), merged.prompt(invoke)
        assert got.token_ids.tolist() == wanted.token_ids.tolist()
        for name in wanted.rows:
            assert relative_error(got.rows[name], wanted.rows[name]) < 1e-5, (invoke, name)
        stored.append(
            StoredPrompt(
                invoke=invoke,
                token_ids=got.token_ids.tolist(),
                positions=got.positions.astype(np.int64),
                rows={name: got.rows[name] for name in ("residual.0", "residual.3")},
            )
        )
    # Another implementation, merged by other code; without the adapter its rows are far away.
    parity = partial(compare, str(tiny_qwen3), stored, compute_dtype="float32", store_dtype="float32")
    report = parity(adapter=read_adapter(str(adapter)))
    assert report.passed, report
    plain = parity()
    assert all(entry.relative_error > 0.1 for entry in plain.locations), plain


def test_an_adapter_on_a_shortened_model(tiny_qwen3, adapter, merged, prompts, tmp_path):
    shortened, stats = harvest_all(tmp_path / "run", tiny_qwen3, ["residual.0"], prompts, lora=str(adapter))
    assert (stats.n_layers, stats.n_layers_run) == (4, 1)
    for invoke, prompt in enumerate(prompts):
        got, wanted = shortened.prompt(invoke), merged.prompt(invoke)
        assert relative_error(got.rows["residual.0"], wanted.rows["residual.0"][: len(prompt)]) < 1e-5


def test_an_adapter_for_modules_that_the_model_lacks_is_refused(tiny_qwen3, tmp_path):
    """Alone, vLLM would serve the plain model without a word."""
    other = make_tiny_adapter(
        tiny_qwen3, tmp_path / "lora", projections=("o_proj",), rename=("model.layers.3", "model.layers.7")
    )
    with pytest.raises(AdapterError, match=r"no place for its weights of model\.layers\.7\.self_attn\.o_proj"):
        harvest_all(tmp_path / "run", tiny_qwen3, ["residual.3"], [[5, 6, 7]], lora=str(other))


def test_ranks_and_scales_follow_the_adapters_configuration(tiny_qwen3, tmp_path):
    changes: dict[str, Any] = {
        "use_rslora": True,
        "rank_pattern": {"q_proj": 16, "layers.1.v_proj": 9},
        "alpha_pattern": {"o_proj": 2},
    }
    adapter = read_adapter(str(make_tiny_adapter(tiny_qwen3, tmp_path / "lora", **changes)))
    assert adapter.engine_arguments() == {"enable_lora": True, "max_loras": 1, "max_lora_rank": 16}
    assert adapter.scale("model.layers.0.self_attn.q_proj") == 8 / 16**0.5
    assert adapter.scale("model.layers.0.self_attn.v_proj") == 8 / 4**0.5
    assert adapter.scale("model.layers.0.self_attn.o_proj") == 2 / 4**0.5
    plain = read_adapter(str(make_tiny_adapter(tiny_qwen3, tmp_path / "plain", rank=3)))
    assert plain.engine_arguments()["max_lora_rank"] == 8
    assert plain.scale("anything") == 8 / 3


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"use_dora": True}, "it uses DoRA"),
        ({"bias": "all"}, "it has biases"),
        ({"modules_to_save": ["lm_head"]}, r"replaces whole modules \['lm_head'\]"),
        ({"peft_type": "IA3"}, "it is a IA3, not a LoRA"),
        ({"r": 1000}, "its rank 1000 is not between 1 and 512"),
    ],
)
def test_an_adapter_that_vllm_would_not_apply_is_refused_by_name(tiny_qwen3, tmp_path, changes, reason):
    make_tiny_adapter(tiny_qwen3, tmp_path / "lora", projections=("o_proj",), **changes)
    with pytest.raises(AdapterError, match=reason):
        read_adapter(str(tmp_path / "lora"))


def test_an_adapter_that_is_not_there_is_refused_by_name(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(AdapterError, match=r"empty is no LoRA adapter in .*adapter_config\.json"):
        read_adapter(str(tmp_path / "empty"))
    with pytest.raises(AdapterError, match="there is no LoRA adapter"):
        read_adapter(str(tmp_path / "nowhere"))
    (tmp_path / "empty/adapter_config.json").write_text('{"r": 8, "lora_alpha": 8}')
    with pytest.raises(AdapterError, match="has no weights"):
        read_adapter(str(tmp_path / "empty"))
    with pytest.raises(EngineArgumentError, match=r"enable_lora: set model\.lora instead"):
        check_engine_arguments({"enable_lora": True})
