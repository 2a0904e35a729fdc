"""Placement of invokes: whole, apart, reproducible, and in sizes that can be staged."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harvest.errors import PlanError
from harvest.plan import choose_shape, pack

sizes = st.lists(st.tuples(st.integers(1, 200), st.integers(1, 400)), min_size=1, max_size=120)


@given(
    sizes=sizes, unit_rows=st.sampled_from([200, 256, 1024]), unit_tokens=st.integers(1, 5000), seed=st.integers(0, 5)
)
def test_each_invoke_has_its_own_rows_in_one_unit(sizes, unit_rows, unit_tokens, seed):
    n_rows = np.array([rows for rows, _ in sizes], np.int64)
    n_tokens = np.array([tokens for _, tokens in sizes], np.int64)
    packing = pack(n_rows=n_rows, n_tokens=n_tokens, unit_rows=unit_rows, unit_tokens=unit_tokens, seed=seed)
    taken = np.zeros(packing.n_units * unit_rows, np.int32)
    tokens_of_unit: dict[int, list[int]] = {}
    for invoke, rows in enumerate(n_rows):
        unit, row = int(packing.unit[invoke]), int(packing.unit_row[invoke])
        assert row + rows <= unit_rows
        taken[unit * unit_rows + row : unit * unit_rows + row + rows] += 1
        tokens_of_unit.setdefault(unit, []).append(int(n_tokens[invoke]))
    assert taken.max() == 1
    assert sorted(tokens_of_unit) == list(range(packing.n_units))
    for tokens in tokens_of_unit.values():
        assert len(tokens) == 1 or sum(tokens) <= unit_tokens
    places = packing.unit[packing.order].astype(np.int64) * unit_rows + packing.unit_row[packing.order]
    assert (np.diff(places) > 0).all()


def test_the_seed_alone_decides_the_order():
    n = np.full(500, 10, np.int64)
    first, again, other = (pack(n_rows=n, n_tokens=n, unit_rows=640, unit_tokens=10**6, seed=s) for s in (7, 7, 8))
    assert np.array_equal(first.order, again.order)
    assert not np.array_equal(first.order, other.order)
    # Shuffled: neighbours in the store are not neighbours in the dataset.
    assert (np.abs(np.diff(first.order)) == 1).mean() < 0.05


@given(
    sizes=sizes,
    widest=st.integers(4, 100_000),
    locations=st.integers(1, 40),
    shard_bytes=st.integers(1, 2**30),
    unit_tokens=st.integers(1, 10**7),
)
def test_chosen_shapes_hold_every_invoke(sizes, widest, locations, shard_bytes, unit_tokens):
    n_rows = np.array([rows for rows, _ in sizes], np.int64)
    n_tokens = np.maximum(n_rows, [tokens for _, tokens in sizes])
    shape = choose_shape(
        n_rows=n_rows,
        n_tokens=n_tokens,
        widest_row_bytes=widest,
        all_rows_bytes=widest * locations,
        shard_bytes=shard_bytes,
        unit_tokens=unit_tokens,
    )
    assert shape.rows_per_shard & (shape.rows_per_shard - 1) == 0
    assert shape.rows_per_shard >= 64
    assert shape.unit_rows >= n_rows.max()


def test_large_targets_give_shards_of_the_wanted_size():
    n = np.full(1_000_000, 1000, np.int64)
    shape = choose_shape(
        n_rows=n,
        n_tokens=n,
        widest_row_bytes=8192,
        all_rows_bytes=8192,
        shard_bytes=256 * 1024**2,
        unit_tokens=1_000_000,
    )
    assert shape.rows_per_shard == 32768
    assert shape.shards_per_unit == 30


def test_a_fixed_unit_that_is_too_small_is_refused():
    n = np.array([1000], np.int64)
    with pytest.raises(PlanError, match="1,000 rows, a unit only 512"):
        choose_shape(
            n_rows=n,
            n_tokens=n,
            widest_row_bytes=8,
            all_rows_bytes=8,
            shard_bytes=1,
            unit_tokens=1,
            rows_per_shard=256,
            shards_per_unit=2,
        )
