"""Statistics while writing: exact where they claim to be, close where they sample, the same for any cut of the rows."""

from __future__ import annotations

import itertools
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.stats import SAMPLE_STRIDE, LocationStatistics, RowStatistics, merge_statistics

TYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}


def gather(values: np.ndarray[Any, Any], dtype: str, cuts: list[int]) -> LocationStatistics:
    gathered = RowStatistics(rows=len(values), dtype=dtype)
    edges = sorted({0, len(values), *cuts})
    for start, stop in reversed(list(itertools.pairwise(edges))):
        gathered.add(start, values[start:stop].view(np.uint8))
    return gathered.finish(np.ones(len(values), np.bool_))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(TYPES)), st.integers(0, 2**32), st.lists(st.integers(1, 199), max_size=6))
def test_against_numpy(dtype: str, seed: int, cuts: list[int]) -> None:
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal((200, 16)) * rng.choice([1e-3, 1, 50])).astype(TYPES[dtype])
    values[rng.integers(0, 200, 3)] = 0
    values[rng.integers(0, 200), 3] = -1000
    bad = rng.integers(0, 200, 2)
    values[bad, 0] = [np.nan, -np.inf]
    found = gather(values, dtype, cuts)
    wide = values.astype(np.float64)
    finite = np.isfinite(wide).all(axis=1)
    assert found.rows == 200
    assert found.nonfinite_rows == (~finite).sum()
    assert found.first_nonfinite_row == min(bad)
    assert found.zero_rows == (wide == 0).all(axis=1).sum()
    assert found.max_abs == np.abs(wide[finite]).max()
    magnitude = np.where(finite, np.abs(wide).max(axis=1), 0)
    assert [x for x, _ in found.largest] == sorted(magnitude, reverse=True)[:8]
    assert all(magnitude[row] == x for x, row in found.largest)
    sampled = wide[::SAMPLE_STRIDE][finite[::SAMPLE_STRIDE]]
    assert found.sampled_values == sampled.size
    assert found.mean == pytest.approx(sampled.mean(), rel=1e-4, abs=1e-4)
    assert found.variance == pytest.approx(sampled.var(), rel=1e-3, abs=1e-9)


def test_cuts_do_not_matter() -> None:
    values = np.random.default_rng(0).standard_normal((300, 8)).astype(ml_dtypes.bfloat16)
    assert gather(values, "bfloat16", []) == gather(values, "bfloat16", [1, 17, 64, 65, 200])


def test_norm_quantiles_and_massive_rows() -> None:
    rng = np.random.default_rng(1)
    values = rng.standard_normal((SAMPLE_STRIDE * 300, 32)).astype(np.float32)
    values[77, 5] = 500
    found = gather(values, "float32", [100])
    norms = np.linalg.norm(values[::SAMPLE_STRIDE], axis=1)
    for q in (0.1, 0.5, 0.9):
        assert found.norm_quantile(q) == pytest.approx(np.quantile(norms, q), rel=0.03)
    assert found.massive_rows() == (77,)
    assert math.isnan(LocationStatistics().norm_quantile(0.5))


def test_merging_is_the_statistics_of_all() -> None:
    values = np.random.default_rng(2).standard_normal((SAMPLE_STRIDE * 8, 8)).astype(np.float32)
    half = len(values) // 2
    parts = [gather(values[:half], "float32", []), gather(values[half:], "float32", []).shifted(half)]
    merged, whole = merge_statistics(parts), gather(values, "float32", [])
    assert merged.largest == whole.largest
    assert merged.norm_bins == whole.norm_bins
    assert merged.mean == pytest.approx(whole.mean)
    assert merged.variance == pytest.approx(whole.variance)
    assert (merged.rows, merged.sampled_values) == (whole.rows, whole.sampled_values)
    assert LocationStatistics.from_json(merged.to_json()) == merged
    assert merge_statistics([]) == LocationStatistics()


def test_clearing_leaves_no_trace() -> None:
    values = np.random.default_rng(3).standard_normal((128, 8)).astype(np.float32)
    gathered = RowStatistics(rows=128, dtype="float32")
    gathered.add(0, values[:96].view(np.uint8))
    gathered.add(96, np.full((32, 8), np.nan, np.float32).view(np.uint8))
    gathered.clear(96, 32)
    mask = np.arange(128) < 96
    found = gathered.finish(mask)
    assert (found.rows, found.nonfinite_rows) == (96, 0)
    assert found.sampled_rows == 2
