"""Rows of quantised weights are those of the dequantised ones, up to the rounding of activations."""

from __future__ import annotations

import numpy as np
import pytest

from actors.worker.locations import resolve_locations
from actors.worker.tree import build_model_tree
from harvest.parity import StoredPrompt, compare
from tests.harness import engine, harvest, make_run
from tests.quantised import write_dequantised_fp8, write_dequantised_int8, write_int8

NAMES = ("residual.0", "residual.3", "mlp_out.1", "neurons.2", "heads.1")
# Activations are rounded before each product: 8 bits of the largest value of a token, or 3 bits of mantissa.
INT8_TOLERANCE = 0.03
FP8_TOLERANCE = 0.10


@pytest.fixture(scope="module")
def prompts():
    random = np.random.default_rng(4)
    return [random.integers(5, 1000, int(n)).tolist() for n in (1, 30, 70, 110)]


def relative_errors(path, prompts, model, reference, **changes):
    """By location, of all rows, against transformers on the reference weights."""
    arguments = changes.get("vllm", {})
    locations = resolve_locations(build_model_tree(str(model), **arguments), NAMES)
    run = make_run(path, prompts, locations)
    with engine(run, model, locations, **changes) as feeder:
        reader = harvest(run, feeder)
    stored = [
        StoredPrompt(invoke=i, token_ids=p, positions=np.arange(len(p)), rows=dict(reader.prompt(i).rows))
        for i, p in enumerate(prompts)
    ]
    report = compare(str(reference), stored, compute_dtype="float32", store_dtype="float32")
    return {entry.location: entry.relative_error for entry in report.locations}


def test_int8_weights_of_a_compressed_tensors_folder(tiny_qwen3, prompts, tmp_path):
    model = write_int8(tiny_qwen3, tmp_path / "int8")
    errors = relative_errors(tmp_path / "run", prompts, model, write_dequantised_int8(tiny_qwen3, tmp_path / "float"))
    assert sorted(errors) == sorted(NAMES)
    assert all(1e-4 < error < INT8_TOLERANCE for error in errors.values()), errors


def test_weights_that_vllm_quantises_at_its_start(tiny_qwen3, prompts, tmp_path):
    changes = {"dtype": "bfloat16", "vllm": {"quantization": "fp8_per_channel"}}
    reference = write_dequantised_fp8(tiny_qwen3, tmp_path / "float")
    errors = relative_errors(tmp_path / "run", prompts, tiny_qwen3, reference, **changes)
    assert sorted(errors) == sorted(NAMES)
    # Far above bfloat16's own rounding (0.005): the weights really are quantised.
    assert all(0.01 < error < FP8_TOLERANCE for error in errors.values()), errors
