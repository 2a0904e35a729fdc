"""Every alias of every family against Hugging Face, in float32 on CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from vllm import SamplingParams, TokensPrompt

from actors.worker.locations import Location, LocationError, families, resolve_in_view, view_model
from actors.worker.locations.values import Call, TensorValue, recording
from actors.worker.locations.view import ModelView
from actors.worker.tree import inspect_architectures_in_process, own_model_classes
from tests.actors.locations.reference import reference_rows
from tests.actors.locations.tiny import ENGINE_ARGS, FAMILIES, N_LAYERS, VOCAB_SIZE, tiny_config
from tests.actors.locations.watching import watch
from tests.engines import open_engine
from tests.tiny_models import scale_weights

TOLERANCE = 1e-4
N_TOKENS = 23


def all_aliases(view: ModelView) -> tuple[list[Location], dict[str, str]]:
    """Locations of all aliases that a model has, and why it lacks the others."""
    names = list(families.ONCE)
    names += [f"{alias}.{layer}" for alias in families.PER_LAYER for layer in range(view.n_layers)]
    found: list[Location] = []
    refused: dict[str, str] = {}
    for name in names:
        try:
            found.extend(resolve_in_view(view, [name]))
        except LocationError as error:
            refused[name] = str(error)
    return found, refused


def engine_model(llm: Any) -> Any:
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()


def relative_error(rows: Tensor, expected: Tensor) -> float:
    """Largest distance of a row from the expected row, in norms of the expected row; a zero row must be zero."""
    return float(((rows - expected).norm(dim=1) / expected.norm(dim=1).clamp_min(1e-30)).max())


@pytest.fixture(scope="module", autouse=True)
def _quick_inspection() -> None:
    inspect_architectures_in_process()


@pytest.mark.parametrize("family", list(FAMILIES))
def test_every_alias_equals_hugging_face(family: str, tmp_path: Path) -> None:
    """Three proofs on one engine.

    - rows of every alias equal Hugging Face's, and an alias is refused only where it does not exist;
    - the weightless pass saw what a real pass does: the same calls with the same shapes;
    - the last residual row, through final norm and head, gives the engine's own logits.
    """
    ids, expected = write_model(family, tmp_path)
    calls: dict[str, list[Call]] = {}
    arguments = ENGINE_ARGS.get(family, {})
    with own_model_classes(), open_engine(tmp_path, skip_tokenizer_init=True, max_model_len=64, **arguments) as llm:
        loaded = engine_model(llm)
        view = view_model(loaded)
        locations, refused = all_aliases(view)
        with recording(loaded, N_TOKENS, calls), watch(loaded, locations) as rows:
            llm.generate(
                [TokensPrompt(prompt_token_ids=ids)],
                SamplingParams(temperature=0.0, max_tokens=1, detokenize=False),
                use_tqdm=False,
            )
        by_name = {location.name: location for location in locations}
        logits = logits_from_residual(loaded, by_name["final_norm"], rows[f"residual.{N_LAYERS - 1}"][N_TOKENS - 1 :])
    errors: dict[str, float] = {}
    for location in locations:
        found = rows[location.name]
        assert found.shape[1] == location.width, location.name
        n_rows = 1 if location.alias == "logits" else N_TOKENS
        errors[location.name] = relative_error(found[:n_rows].float(), expected[location.name])
    assert {name: error for name, error in errors.items() if not error < TOLERANCE} == {}
    lacking = {name for name in expected if name in refused}
    assert all("latent attention" in refused[name] for name in lacking), {name: refused[name] for name in lacking}
    assert relative_error(logits, rows["logits"]) < 1e-5
    real, weightless = shapes_of_calls(calls), shapes_of_calls(view.values.calls)
    assert {path: real.get(path) for path in weightless} == weightless
    # What only a real pass calls is inside fused kernels: experts, and projections of the latent kernel.
    assert all(".experts." in path or path.endswith("kv_b_proj") for path in real.keys() - weightless.keys())


def test_real_weights_equal_hugging_face(smollm2: Path) -> None:
    """SmolLM2-135M: 30 layers of trained weights, with the outliers that trained models have."""
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32, attn_implementation="eager").eval()
    text = "The residual stream of a trained model has a few very large features, most of all at its first token."
    ids = AutoTokenizer.from_pretrained(smollm2)(text)["input_ids"]
    expected = reference_rows("llama", model, ids)
    with open_engine(smollm2, skip_tokenizer_init=True, max_model_len=64) as llm:
        loaded = engine_model(llm)
        locations, _ = all_aliases(view_model(loaded))
        with watch(loaded, locations) as rows:
            llm.generate(
                [TokensPrompt(prompt_token_ids=ids)],
                SamplingParams(temperature=0.0, max_tokens=1, detokenize=False),
                use_tqdm=False,
            )
    errors = {
        name: relative_error(rows[name][: len(reference)].float(), reference) for name, reference in expected.items()
    }
    assert len(errors) == 3 + 12 * 30
    assert {name: error for name, error in errors.items() if not error < TOLERANCE} == {}


def write_model(family: str, path: Path) -> tuple[list[int], dict[str, Tensor]]:
    """A model folder, a prompt, and what Hugging Face computes for it."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(family), dtype=torch.float32, attn_implementation="eager")
    scale_weights(model.eval(), seed=1)
    model.save_pretrained(path)
    ids = torch.randint(3, VOCAB_SIZE, (N_TOKENS,)).tolist()
    return ids, reference_rows(family, model, ids)


def logits_from_residual(model: Any, final_norm: Location, residual: Tensor) -> Tensor:
    with torch.inference_mode():
        normed = model.get_submodule(final_norm.module)(residual.clone())
        return model.compute_logits(normed[0] if isinstance(normed, tuple) else normed)


def shapes_of_calls(calls: Mapping[str, Sequence[Call]]) -> dict[str, list[str]]:
    """Calls of all modules as text with `tokens` in place of their number, but for the rows that a sampler chooses."""
    return {
        path: [f"{_text(call.args)} {_text(call.kwargs)} -> {_text(call.output)}" for call in made]
        for path, made in calls.items()
        if path != "logits_processor"
    }


def _text(value: Any) -> str:
    if isinstance(value, TensorValue):
        return str(value)
    if isinstance(value, tuple):
        return f"({', '.join(map(_text, value))})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_text(part)}" for key, part in value.items()) + "}"
    return str(value.__name__)
