"""One row an invoke: the mean or maximum of its selected rows, whatever the engine does with its batches."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actors.selection import Selection
from actors.worker import worker_cls
from actors.worker.reduction import BLOCK_ROWS, Reductions
from actors.worker.rows import Registration, RowBook
from actors.worker.step import StepRows, StepRowsError
from harvest.config import parse_config
from harvest.errors import ConfigError
from harvest.runs import open_or_plan
from harvest.verification import verify_run
from tests.harness import engine, harvest, harvest_config, make_run

NAMES = ("residual.0", "residual.3", "mlp_out.1")
KV_BLOCK_TOKENS = 128
KV_TOKEN_BYTES = 4 * 2 * 2 * 32 * 4
EXPECTED = {"mean": lambda rows: rows.mean(0), "max": lambda rows: rows.max(0)}


def make_step(entries):
    counts = [n for _, _, n in entries]
    return StepRows.checked(
        request_ids=tuple(name for name, _, _ in entries),
        starts=np.concatenate([[0], np.cumsum(counts)]),
        first_positions=np.array([first for _, first, _ in entries]),
        scheduled={name: n for name, _, n in entries},
    )


def register(book, request, positions, *, unit=1, reduced=True):
    positions = np.asarray(positions, np.int64)
    book.register(
        f"r{request}",
        Registration(unit=unit, attempt=2, invoke=request, unit_row=request, positions=positions, reduced=reduced),
    )


def reduce_step(book, reductions, step, values):
    """What a step stores: (unit_row, position) -> row."""
    take = book.take(step)
    reducer = reductions.begin_step(take)
    if take is None:
        return {}
    assert reducer is not None
    partial = reducer.reduce(values[torch.from_numpy(take.source_rows)])
    rows = reductions.end_step("here", partial, reducer)
    assert len(rows) == len(take.segments) == len(take.positions) == len(take.invokes) == len(take.label_rows)
    assert take.segments.begins.tolist() == list(range(len(rows)))
    assert (take.segments.counts == 1).all()
    labels = zip(take.segments.unit_rows.tolist(), take.positions.tolist(), take.invokes.tolist(), strict=True)
    return {label: row.numpy() for label, row in zip(labels, rows, strict=True)}


@settings(suppress_health_check=[HealthCheck.large_base_example, HealthCheck.too_slow], deadline=None)
@given(st.data(), st.sampled_from(["mean", "max"]))
def test_each_position_counts_once_under_chunks_preemption_and_aborts(data, reduce):
    """Simulates an engine that chunks, preempts, reorders and aborts; a recomputed row has another value."""
    random = np.random.default_rng(data.draw(st.integers(0, 1000)))
    n_requests = data.draw(st.integers(1, 5))
    lengths = [data.draw(st.integers(1, 3 * BLOCK_ROWS)) for _ in range(n_requests)]
    wanted = [sorted(data.draw(st.sets(st.integers(0, n - 1), min_size=1))) for n in lengths]
    first_seen = [np.full((n, 3), np.nan, np.float32) for n in lengths]
    book, reductions = RowBook(), Reductions(reduce, store_dtype=torch.float32, device=torch.device("cpu"))
    for request in range(n_requests):
        register(book, request, wanted[request])
    stored: dict = {}
    computed = [0] * n_requests
    aborted: set[int] = set()
    while any(done < n for done, n in zip(computed, lengths, strict=True)):
        entries, values = [], []
        for request in data.draw(st.permutations(range(n_requests))):
            event = data.draw(st.integers(0, 20))
            if event == 0:
                computed[request] = 0  # preempted: positions run again
            if event == 1 and computed[request] < lengths[request]:
                aborted.add(request)
                book.forget([f"r{request}"])
                computed[request] = lengths[request]
            left = lengths[request] - computed[request]
            if left and data.draw(st.booleans()):
                n = data.draw(st.integers(1, left))
                rows = random.normal(size=(n, 3)).astype(np.float32)
                seen = first_seen[request][computed[request] : computed[request] + n]
                seen[:] = np.where(np.isnan(seen), rows, seen)
                entries.append((f"r{request}", computed[request], n))
                values.append(rows)
                computed[request] += n
        if entries:
            new = reduce_step(book, reductions, make_step(entries), torch.from_numpy(np.concatenate(values)))
            assert not set(new) & set(stored)
            stored.update(new)
    for request, positions in enumerate(wanted):
        key = (request, positions[-1], request)
        if request in aborted and key not in stored:
            continue
        expected = EXPECTED[reduce](first_seen[request][positions].astype(np.float64))
        np.testing.assert_allclose(stored.pop(key), expected, rtol=1e-5, atol=1e-5)
    assert not stored
    assert not book._reduced.slots, "slots of ended and forgotten requests are free"
    assert book._reduced.n_slots <= n_requests


def test_slots_are_used_again_and_carry_nothing_over():
    book, reductions = RowBook(), Reductions("mean", store_dtype=torch.float32, device=torch.device("cpu"))
    rows = torch.ones(2, 4)
    for request in range(50):
        register(book, request, [0, 1, 2, 3], unit=request)
        assert reduce_step(book, reductions, make_step([(f"r{request}", 0, 2)]), rows * 1e6) == {}
        book.forget_unit(request, 2)  # aborted half-way
        register(book, request, [0, 1], unit=request)
        ((_, row),) = reduce_step(book, reductions, make_step([(f"r{request}", 0, 2)]), rows * request).items()
        assert row.tolist() == [request] * 4
    assert book._reduced.n_slots == 1


def test_what_is_not_a_number_stays_so():
    rows = torch.ones(2 * BLOCK_ROWS, 3)
    rows[7, 1] = torch.nan
    for reduce in ("mean", "max"):
        book, reductions = RowBook(), Reductions(reduce, store_dtype=torch.float32, device=torch.device("cpu"))
        register(book, 0, range(4 * BLOCK_ROWS))
        assert not reduce_step(book, reductions, make_step([("r0", 0, len(rows))]), rows)
        step = make_step([("r0", len(rows), len(rows))])
        ((_, row),) = reduce_step(book, reductions, step, torch.ones(len(rows), 3)).items()
        assert np.isnan(row).tolist() == [False, True, False]


def test_a_step_of_both_kinds_is_refused():
    book = RowBook()
    register(book, 0, [0])
    register(book, 1, [0], reduced=False)
    with pytest.raises(StepRowsError, match="mixes"):
        book.take(make_step([("r0", 0, 1), ("r1", 0, 1)]))


# -- with real engines ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def locations(tiny_qwen3):
    from actors.worker.locations import resolve_locations
    from actors.worker.tree import build_model_tree

    return resolve_locations(build_model_tree(str(tiny_qwen3)), NAMES)


@pytest.fixture(scope="module")
def prompts():
    random = np.random.default_rng(7)
    return [random.integers(5, 1000, int(n)).tolist() for n in [1, 2, 300, *random.integers(1, 300, 29)]]


@pytest.fixture(scope="module")
def alone(tiny_qwen3, locations, prompts, tmp_path_factory):
    """All rows of every prompt by itself."""
    run = make_run(tmp_path_factory.mktemp("alone") / "run", prompts, locations)
    with engine(run, tiny_qwen3, locations, vllm={"max_num_seqs": 1, "max_num_batched_tokens": 512}) as feeder:
        return harvest(run, feeder)


@pytest.mark.parametrize(
    ("reduce", "static_rows"),
    [("mean", 0), ("max", 8)],  # 8: smaller passes go through the static buffer, as with CUDA graphs, larger directly
)
def test_preempted_and_chunked_prompts_are_reduced_right(
    tiny_qwen3, locations, prompts, alone, tmp_path, monkeypatch, reduce, static_rows
):
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE")
    monkeypatch.setattr(worker_cls, "_largest_captured_rows", lambda config: static_rows)
    recomputed_halves = count_recomputed_halves(monkeypatch)
    selection = Selection(reduce=reduce, skip_first=1, special_ids=tuple(range(200, 300)))
    kept = [i for i, p in enumerate(prompts) if selection.count(n_prompt_tokens=len(p), max_tokens=1, token_ids=p)]
    dropped = len(prompts) - len(kept)
    assert dropped, "a prompt of one token has no row"
    own = [prompts[i] for i in kept]
    run = make_run(tmp_path / "run", own, locations, n_units=2, selection=selection, max_tokens=150)
    vllm = {
        "max_num_batched_tokens": 16,
        "max_num_seqs": 8,
        "kv_cache_memory_bytes": 6 * KV_BLOCK_TOKENS * KV_TOKEN_BYTES,
    }
    sampling = {"temperature": 0.0, "ignore_eos": True}
    with engine(
        run, tiny_qwen3, locations, selection=selection, vllm=vllm, sampling=sampling, generates=True
    ) as feeder:
        reader = harvest(run, feeder, timeout_s=300)
        stats = feeder.stats
    assert stats.n_recomputed > 0 and recomputed_halves, "no half-summed prompt was preempted: this tests nothing"
    assert stats.n_rows == len(own)
    for invoke, (prompt, source) in enumerate(zip(own, kept, strict=True)):
        positions = selection.positions(n_prompt_tokens=len(prompt), max_tokens=150, invoke=invoke, token_ids=prompt)
        got, every = reader.prompt(invoke), alone.prompt(source)
        assert got.positions.tolist() == [positions[-1]]
        assert got.token_ids.tolist() == [prompt[positions[-1]]]
        for name in NAMES:
            expected = EXPECTED[reduce](every.rows[name][positions].astype(np.float64))
            error = np.linalg.norm(got.rows[name][0] - expected) / np.linalg.norm(expected)
            assert error < 1e-5, (invoke, name, error)


def count_recomputed_halves(monkeypatch):
    """Names of requests that came a second time while their partial result was waiting."""
    found: list[str] = []
    take = RowBook.take

    def watched(self, step):
        for name, first in zip(step.request_ids, step.first_positions, strict=True):
            if name in self._reduced.slots and first < self.next_position(name):
                found.append(name)
        return take(self, step)

    monkeypatch.setattr(RowBook, "take", watched)
    return found


def config_of(model, data, store, **capture):
    return parse_config(
        {
            "model": {"name": str(model), "dtype": "float32"},
            "dataset": {"path": str(data), "id_column": "id", "limit": 12},
            "tokenization": {"processes": 1},
            "capture": {"locations": ["residual.1", "mlp_out.2"], **capture},
            "store": {"path": str(store)},
            "engine": {"vllm": {"max_num_seqs": 8, "max_num_batched_tokens": 64}},
        }
    )


def test_a_configured_run_is_reduced_in_float32_verified_and_in_parity(tiny_qwen3, demo_text, tmp_path):
    rows = {"reduce": "mean", "skip_special_tokens": True}
    reader = harvest_config(config_of(tiny_qwen3, demo_text, tmp_path / "run", rows=rows))
    every = harvest_config(config_of(tiny_qwen3, demo_text, tmp_path / "all", rows={"skip_special_tokens": True}))
    assert reader.layout.locations[0].dtype == "bfloat16"
    report = verify_run(tmp_path / "run", parity=12)
    assert report.store.ok and not report.store.findings, report.store.findings
    assert report.store.rows_checked == 12
    assert report.parity is not None and report.parity.passed, report.parity
    assert [entry.n_rows for entry in report.parity.locations] == [12, 12]
    # Rounding each row and then the mean doubles the error of rounding the mean: the rows were not rounded first.
    errors = [entry.relative_error for entry in report.parity.locations]
    rounded_first = []
    for invoke in range(12):
        ours = reader.prompt(invoke)
        assert ours.positions.tolist() == every.prompt(invoke).positions[-1:].tolist()
        for name in ours.rows:
            mean = every.prompt(invoke).rows[name].astype(np.float32).mean(0)
            rounded_first.append((mean.astype(ours.rows[name].dtype) != ours.rows[name][0]).mean())
    assert max(errors) < 2**-9
    assert min(rounded_first) > 0, "a mean of rounded rows is another one: were rows rounded before?"


def test_parity_finds_a_row_that_covers_other_positions(tiny_qwen3, demo_text, tmp_path, monkeypatch):
    config = config_of(tiny_qwen3, demo_text, tmp_path / "run", rows={"reduce": "max"})
    harvest_config(config, selection=Selection(reduce="max", skip_first=2))
    parity = verify_run(tmp_path / "run", parity=12).parity
    assert parity is not None and not parity.passed


@pytest.mark.parametrize(
    ("capture", "words"),
    [
        ({"rows": {"reduce": "median"}}, "'mean' or 'max'"),
        ({"rows": {"reduce": "mean", "source": "both"}, "generation": {"max_tokens": 4}}, 'with source = "both"'),
        ({"rows": {"reduce": "max", "source": "generated"}, "generation": {"max_tokens": 4}}, "where an answer ends"),
    ],
)
def test_reductions_that_cannot_be_placed_are_refused(tiny_qwen3, demo_text, tmp_path, capture, words):
    with pytest.raises(ConfigError, match=words):
        config_of(tiny_qwen3, demo_text, tmp_path / "run", **capture)


def test_reduced_logits_are_refused(tiny_qwen3, demo_text, tmp_path):
    config = config_of(
        tiny_qwen3, demo_text, tmp_path / "run", locations=["logits"], rows={"select": "last", "reduce": "mean"}
    )
    with pytest.raises(ConfigError, match=r'rows.reduce = "mean" has nothing to reduce'):
        open_or_plan(config)


def test_a_run_says_how_its_rows_were_made(tiny_qwen3, demo_text, tmp_path):
    path = open_or_plan(config_of(tiny_qwen3, demo_text, tmp_path / "run", rows={"reduce": "max"})).path
    assert json.loads((path / "run.json").read_text())["run"]["selection"]["reduce"] == "max"
