"""`tokens/logprob` is what another implementation's log-softmax gives for the very token of the row."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from actors.logprobs import MissingLogprobs, row_logprobs, write_logprobs
from actors.protocol import InvokeOutcome
from actors.selection import Selection
from harvest.config import parse_config
from harvest.errors import ConfigError, PlanError
from harvest.runs import open_or_plan
from storage.format import LocationSpec, StoreLayout
from storage.label_check import label_problems
from storage.reader import StoreReader
from storage.verify import verify
from tests.actors.test_feeder import LOCATIONS, start
from tests.harness import engine, harvest, harvest_config, make_run


def config_of(model, data, store, *, generation=None, rows=None, **changes):
    return parse_config(
        {
            "model": {"name": str(model), "dtype": "float32"},
            "dataset": {"path": str(data), "id_column": "id", "limit": 12},
            "tokenization": {"processes": 1},
            "capture": {
                "locations": ["residual.1"],
                "rows": {"source": "both", "skip_first": 3, **(rows or {})},
                "generation": {"max_tokens": 12, "logprobs": True, **(generation or {})},
            },
            "store": {"path": str(store), "dtype": "float32"},
            "engine": {"vllm": {"max_num_seqs": 5, "max_num_batched_tokens": 64}},
            **changes,
        }
    )


@pytest.fixture(scope="module")
def reference(tiny_qwen3):
    """Log-probability of each token of a sequence but the first, by transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_qwen3, dtype=torch.float32).eval()

    def logprobs(token_ids):
        ids = torch.tensor(token_ids)
        with torch.inference_mode():
            logits = model(ids.unsqueeze(0)).logits[0]
        return logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0].numpy()

    return logprobs


@pytest.mark.parametrize("sampled", [False, True])
def test_logprobs_are_those_of_transformers(tiny_qwen3, demo_text, tmp_path, reference, sampled):
    """Greedy, and sampled at another temperature among a few tokens; one token of twelve ends an answer."""
    generation = {"temperature": 0.7, "top_k": 20} if sampled else {}
    config = config_of(tiny_qwen3, demo_text, tmp_path / "run", generation=generation)
    sampling = {"temperature": 0.0, **generation, "logprobs": 0, "stop_token_ids": list(range(2, 1024, 12))}
    reader = harvest_config(config, sampling=sampling)
    ends, n_values = set(), 0
    for invoke in range(12):
        stored = reader.prompt(invoke)
        prompt = stored.prompt_token_ids.tolist()
        generated = stored.positions >= len(prompt)
        expected = reference([*prompt, *stored.token_ids[generated].tolist()])[stored.positions - 1]
        assert stored.logprobs is not None and stored.logprobs.dtype == np.float32
        assert np.isnan(stored.logprobs[~generated]).all() and (~generated).any()
        np.testing.assert_allclose(stored.logprobs[generated], expected[generated], rtol=1e-4, atol=1e-3)
        ends.add(int(generated.sum()))
        n_values += int(generated.sum())
    assert n_values > 12 and len(ends) > 2, "answers end at many lengths"
    report = verify(tmp_path / "run")
    assert report.ok and not report.findings, report.findings


def test_holes_are_not_a_number_for_every_reader(tiny_qwen3, demo_text, tmp_path):
    import zarr

    reader = harvest_config(config_of(tiny_qwen3, demo_text, tmp_path / "run"))
    layout = reader.layout
    assert layout.logprobs and layout.nan_logprobs
    owner, ours = reader.array("tokens/invoke", slice(None)), reader.array("tokens/logprob", slice(None))
    assert (owner == -1).any() and np.isnan(ours[owner == -1]).all()
    array = zarr.open(tmp_path / "run" / "data.zarr", mode="r")["tokens/logprob"]
    np.testing.assert_array_equal(array[:], ours)
    assert json.loads((tmp_path / "run/data.zarr/tokens/logprob/zarr.json").read_text())["fill_value"] == "NaN"
    # A layout of the first runs, which wrote zero there, is still what it was.
    old = StoreReader(Path(__file__).parents[1] / "storage/golden/v1-plain").layout
    assert old.logprobs and old.arrays["tokens/logprob"].fill == 0 and "nan_logprobs" not in old.to_json()
    assert StoreLayout.from_json(json.loads(json.dumps(layout.to_json()))) == layout
    # Planned again under the same settings it is the same run, under others not.
    assert not open_or_plan(config_of(tiny_qwen3, demo_text, tmp_path / "run")).new
    with pytest.raises(PlanError, match="generation.logprobs was True, is False"):
        open_or_plan(
            config_of(
                tiny_qwen3,
                demo_text,
                tmp_path / "run",
                generation={"logprobs": False},
            )
        )
    # Verification finds what does not fit.
    unit = 0
    plan = reader.run.plan.read_unit(unit).to_pydict()
    labels = {name: reader.array(name, layout.rows_of(unit)).copy() for name in layout.token_arrays}
    assert not list(label_problems(layout, reader.receipt(unit), plan, labels))
    logprobs, owner = labels["tokens/logprob"], labels["tokens/invoke"]
    for change in ((np.flatnonzero(owner == -1)[0], -1.0), (np.flatnonzero(~np.isnan(logprobs))[0], np.nan)):
        before = logprobs[change[0]]
        logprobs[change[0]] = change[1]
        assert len(list(label_problems(layout, reader.receipt(unit), plan, labels))) == 1
        logprobs[change[0]] = before


def test_two_ranks_write_them_once(tiny_qwen3, tmp_path, monkeypatch, reference):
    from actors.worker.locations import resolve_locations
    from actors.worker.tree import build_model_tree

    locations = resolve_locations(build_model_tree(str(tiny_qwen3)), ["residual.1", "residual.2"])
    prompts = [np.random.default_rng(i).integers(5, 1000, 5 + i).tolist() for i in range(4)]
    selection = Selection(source="generated")
    run = make_run(tmp_path / "run", prompts, locations, selection=selection, max_tokens=6, logprobs=True)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with engine(
        run,
        tiny_qwen3,
        locations,
        selection=selection,
        sampling={"temperature": 0.0, "ignore_eos": True, "logprobs": 0},
        generates=True,
        tensor_parallel_size=2,
    ) as feeder:
        reader = harvest(run, feeder)
    for invoke, prompt in enumerate(prompts):
        stored = reader.prompt(invoke)
        assert len(stored.positions) == 5 and stored.logprobs is not None
        expected = reference([*prompt, *stored.token_ids.tolist()])[-5:]
        np.testing.assert_allclose(stored.logprobs, expected, rtol=1e-4, atol=1e-3)


def test_a_scripted_engine_stores_them_too(tmp_path):
    selection = Selection(source="both")
    run = make_run(tmp_path / "run", [[1, 2, 3]], LOCATIONS, selection=selection, max_tokens=4, logprobs=True)
    feeder, _, stop = start(run, selection=selection)
    reader = harvest(run, feeder)
    stop()
    stored = reader.prompt(0)
    assert stored.positions.tolist() == [0, 1, 2]
    assert stored.logprobs is not None and np.isnan(stored.logprobs).all()


def test_each_row_gets_the_value_of_its_own_token():
    values = row_logprobs(np.array([1, 4, 5, 7]), n_prompt=5, sampled=[-1.0, -2.0, -3.0, -4.0])
    np.testing.assert_array_equal(values, np.array([np.nan, np.nan, -1, -3], np.float32))
    outcome = InvokeOutcome(invoke=8, unit_row=0, n_planned_rows=1, n_rows=1, status="ok")
    with pytest.raises(MissingLogprobs, match="invoke 8"):
        write_logprobs(SimpleNamespace(write=None), [outcome])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"rows": {"source": "prompt"}},
            r'generation.logprobs labels rows of generated tokens, of which rows.source = "p',
        ),
        ({"engine": {"vllm": {"logprobs_mode": "processed_logits"}}}, "holds raw logprobs in every run"),
    ],
)
def test_logprobs_that_cannot_be_had_are_refused(tmp_path, changes, words):
    with pytest.raises(ConfigError, match=words):
        config_of("model", "data.jsonl", tmp_path, **changes)


def test_layouts_without_logprobs_have_no_array():
    location = LocationSpec(name="a", path="a", width=4)
    layout = StoreLayout(locations=(location,), rows_per_shard=64, shards_per_unit=1, n_units=1, n_invokes=1)
    assert "tokens/logprob" not in layout.arrays
