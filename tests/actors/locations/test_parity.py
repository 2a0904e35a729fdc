"""Every alias of every family against Hugging Face, in float32 on CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from vllm import SamplingParams, TokensPrompt

from actors.worker.locations import Location, LocationError, families, read, resolve_in_view, view_model
from actors.worker.locations.view import ModelView
from actors.worker.tree import inspect_architectures_in_process
from tests.actors.locations.reference import reference_rows
from tests.actors.locations.tiny import FAMILIES, N_LAYERS, VOCAB_SIZE, tiny_config
from tests.engines import open_engine
from tests.tiny_models import scale_weights

TOLERANCE = 1e-4
N_TOKENS = 24


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


@contextlib.contextmanager
def watch(model: Any, locations: Sequence[Location]) -> Iterator[dict[str, Tensor]]:
    """Rows [T, D] of the latest pass by name of location, copied where a tap would copy them."""
    rows: dict[str, Tensor] = {}
    with contextlib.ExitStack() as undo:
        for location in locations:
            module = model.get_submodule(location.module)
            forward = module.forward

            def watched(
                *args: Any, location: Location = location, forward: Any = forward, **kwargs: Any
            ) -> Any:
                if location.side != "output":
                    _take(rows, location, read(location, args, kwargs, None))
                output = forward(*args, **kwargs)
                if location.side == "output":
                    _take(rows, location, read(location, args, kwargs, output))
                return output

            module.forward = watched
            undo.callback(setattr, module, "forward", forward)
        yield rows


def _take(rows: dict[str, Tensor], location: Location, halves: tuple[Tensor, Tensor | None]) -> None:
    x, residual = halves
    rows[location.name] = x.clone() if residual is None else x + residual


def engine_model(llm: Any) -> Any:
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()


def relative_error(rows: Tensor, expected: Tensor) -> float:
    """Largest distance of a row from the expected row, in norms of the expected row."""
    return float(((rows - expected).norm(dim=1) / expected.norm(dim=1)).max())


@pytest.fixture(scope="module", autouse=True)
def _quick_inspection() -> None:
    inspect_architectures_in_process()


@pytest.mark.parametrize("model_type", list(FAMILIES))
def test_every_alias_equals_hugging_face(model_type: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = tiny_config(model_type)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    scale_weights(model, seed=1)
    model.save_pretrained(tmp_path)
    ids = torch.randint(3, VOCAB_SIZE, (N_TOKENS,)).tolist()
    expected = reference_rows(model_type, model, ids)
    with open_engine(tmp_path, skip_tokenizer_init=True, max_model_len=64) as llm:
        loaded = engine_model(llm)
        locations, refused = all_aliases(view_model(loaded))
        with watch(loaded, locations) as rows:
            llm.generate(
                [TokensPrompt(prompt_token_ids=ids)],
                SamplingParams(temperature=0.0, max_tokens=1, detokenize=False),
                use_tqdm=False,
            )
    errors: dict[str, float] = {}
    for location in locations:
        found = rows[location.name]
        assert found.shape[1] == location.width, location.name
        n_rows = 1 if location.alias == "logits" else N_TOKENS
        errors[location.name] = relative_error(found[:n_rows].float(), expected[location.name])
    assert {name: error for name, error in errors.items() if not error < TOLERANCE} == {}
    # An alias is refused only where Hugging Face's model has no such place either.
    assert {name for name in expected if name in refused} <= {name for name in refused if "latent" in refused[name]}
    assert len(locations) >= 3 + 9 * N_LAYERS
