"""The loader: each stored row once over all ranks, labelled right; the same order again from any batch on."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import harvest
from harvest import loader as loader_module
from harvest.errors import LoaderError
from harvest.loader import RowLoader
from storage.commit import Committer
from storage.errors import DamagedError, StorageError
from storage.format import LocationSpec
from storage.run_folder import RunFolder
from storage.testing import ScriptedRun

SCRIPT = ScriptedRun(seed=4, n_units=6)
# (invoke, position) of each stored row.
STORED = [(x.invoke, position) for x in SCRIPT.invokes for position in range(x.n_rows)]
SMALL: dict[str, Any] = {"buffer_bytes": 1 << 14, "block_bytes": 1 << 10}


@pytest.fixture(scope="module", params=[None, "zstd"], ids=["plain", "zstd"])
def run(request, tmp_path_factory) -> RunFolder:
    script = ScriptedRun(seed=4, n_units=6, compression=request.param)
    folder = script.create(tmp_path_factory.mktemp("loader") / "run")
    script.finish(folder)
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> RunFolder:
    folder = SCRIPT.create(tmp_path_factory.mktemp("loader") / "run")
    SCRIPT.finish(folder)
    return folder


def labels_of(batches: Any) -> list[tuple[int, int]]:
    return [
        pair for batch in batches for pair in zip(batch["invokes"].tolist(), batch["positions"].tolist(), strict=True)
    ]


def test_every_stored_row_comes_once_with_its_own_values_and_labels(run):
    loader = RowLoader(run.path, ["residual.1", "attempt"], batch_size=10, labels=True, drop_last=False, **SMALL)
    batches = list(loader)
    assert len(batches) == len(loader) == -(-len(STORED) // 10)
    assert loader.n_rows == len(STORED)
    assert sorted(labels_of(batches)) == STORED
    values = {x.invoke: SCRIPT.rows("acts/residual.1", x) for x in SCRIPT.invokes}
    for batch in batches:
        assert batch["residual.1"].dtype == torch.bfloat16
        assert batch["attempt"].shape == (len(batch["invokes"]), 2)
        for row, (invoke, position) in zip(batch["residual.1"], labels_of([batch]), strict=True):
            assert row.view(torch.int16).numpy().tobytes() == values[invoke][position].tobytes()
        expected = [SCRIPT.tokens(invoke, position + 1)[-1] for invoke, position in labels_of([batch])]
        assert batch["token_ids"].tolist() == expected


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    batch_size=st.integers(1, 40),
    world_size=st.integers(1, 4),
    seed=st.integers(0, 3),
    epoch=st.integers(0, 2),
    buffer_bytes=st.integers(1, 1 << 15),
    block_bytes=st.integers(1, 4096),
    shuffle=st.booleans(),
    data=st.data(),
)
def test_ranks_share_an_epoch_and_any_batch_is_a_place_to_go_on(
    plain, batch_size, world_size, seed, epoch, buffer_bytes, block_bytes, shuffle, data
):
    arguments: dict[str, Any] = {
        "batch_size": batch_size,
        "world_size": world_size,
        "seed": seed,
        "buffer_bytes": buffer_bytes,
        "block_bytes": block_bytes,
        "shuffle": shuffle,
        "labels": True,
    }
    shares = []
    for rank in range(world_size):
        loader = RowLoader(plain.path, "attempt", rank=rank, **arguments)
        loader.set_epoch(epoch)
        shares.append(list(loader))
    n_batches = {len(share) for share in shares}
    assert len(n_batches) == 1, "ranks must not wait for each other"
    assert all(len(batch["invokes"]) == batch_size for share in shares for batch in share)
    seen = Counter(pair for share in shares for pair in labels_of(share))
    assert set(seen.values()) <= {1}
    assert set(seen) <= set(STORED)
    if world_size == 1:
        assert len(STORED) - len(seen) < batch_size
    # From the middle, with a new process's loader.
    rank = data.draw(st.integers(0, world_size - 1))
    at = data.draw(st.integers(0, n_batches.pop()))
    first = RowLoader(plain.path, "attempt", rank=rank, **arguments)
    first.set_epoch(epoch)
    list(itertools.islice(first, at))
    if at < len(shares[rank]):
        second = RowLoader(plain.path, "attempt", rank=rank, **arguments)
        second.load_state_dict(first.state_dict())
        assert labels_of(second) == labels_of(shares[rank][at:])
        assert second.state_dict()["epoch"] == epoch + 1


def test_epochs_and_seeds_have_orders_of_their_own(plain):
    loader = RowLoader(plain.path, "attempt", batch_size=8, labels=True, drop_last=False, **SMALL)
    orders = [labels_of(loader) for _ in range(3)]
    orders.append(
        labels_of(RowLoader(plain.path, "attempt", batch_size=8, seed=1, labels=True, drop_last=False, **SMALL))
    )
    assert len(set(map(tuple, orders))) == 4
    assert all(sorted(order) == STORED for order in orders)
    unshuffled = RowLoader(plain.path, "attempt", batch_size=8, labels=True, drop_last=False, shuffle=False, **SMALL)
    assert labels_of(unshuffled) == STORED
    again = RowLoader(plain.path, "attempt", batch_size=8, labels=True, drop_last=False, **SMALL)
    assert labels_of(again) == orders[0]
    forever = labels_of(
        itertools.islice(RowLoader(plain.path, "attempt", batch_size=8, labels=True, **SMALL).forever(), 400)
    )
    assert max(Counter(forever).values()) >= 2


def test_rows_of_a_batch_come_from_all_over_the_run(tmp_path):
    """Neighbours in the stream are of the same unit about as often as chance has it."""
    script = ScriptedRun(seed=9, n_units=40)
    folder = script.create(tmp_path / "run")
    script.finish(folder, at_once=20)
    unit_of = {x.invoke: x.unit for x in script.invokes}
    row_bytes = 8 + 16
    loader = RowLoader(
        folder.path,
        "attempt",
        batch_size=64,
        labels=True,
        buffer_bytes=2 * 64 * 32 * row_bytes,
        block_bytes=32 * row_bytes,
    )
    units = np.array([unit_of[invoke] for invoke, _ in labels_of(loader)])
    same = float((units[1:] == units[:-1]).mean())
    assert same < 2.5 / 40
    assert len(set(units[:64].tolist())) > 20


def test_a_run_is_followed_while_it_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(loader_module, "_FOLLOW_S", 0.02)
    folder = SCRIPT.create(tmp_path / "run")
    arguments: dict[str, Any] = {
        "batch_size": 8,
        "labels": True,
        "drop_last": False,
        "follow": True,
        **SMALL,
        "buffer_bytes": 1 << 12,
    }
    loader = RowLoader(folder.path, "attempt", **arguments)
    with pytest.raises(TypeError, match="does not know its length"):
        len(loader)
    steps = threading.Semaphore(0)

    def go_on() -> None:
        with Committer.open(folder) as committer:
            for unit in (3, 0, 5, 1, 4, 2):
                steps.acquire(timeout=20)
                committer.publish([SCRIPT.attempt(folder, unit, committer.next_attempt(unit))])
            steps.acquire(timeout=20)
            committer.finalise()

    thread = threading.Thread(target=go_on)
    thread.start()
    steps.release()
    steps.release()
    batches = iter(loader)
    seen = [next(batches) for _ in range(3)]
    state = loader.state_dict()
    for _ in range(5):
        steps.release()
    seen += list(batches)
    thread.join()
    assert sorted(labels_of(seen)) == STORED
    # What has been followed to its end has the same order again, also from a place in it on.
    assert labels_of(RowLoader(folder.path, "attempt", **arguments)) == labels_of(seen)
    later = RowLoader(folder.path, "attempt", **arguments)
    later.load_state_dict(state)
    assert labels_of(later) == labels_of(seen[3:])


@pytest.mark.parametrize(("n_workers", "start"), [(1, "fork"), (2, "fork"), (2, "spawn")])
def test_a_dataloaders_processes_share_the_rows(plain, n_workers, start):
    loader = RowLoader(plain.path, "attempt", batch_size=8, labels=True, **SMALL)
    batches = DataLoader(loader, batch_size=None, num_workers=n_workers, multiprocessing_context=start)
    seen = Counter(labels_of(batches))
    assert set(seen.values()) == {1}
    assert len(seen) > 0.8 * len(STORED), "but for the rows by which one has more than another"


def test_iterating_after_a_break_goes_on(plain):
    arguments: dict[str, Any] = {"batch_size": 8, "labels": True, **SMALL}
    whole = labels_of(RowLoader(plain.path, "attempt", **arguments))
    loader = RowLoader(plain.path, "attempt", **arguments)
    seen = list(itertools.islice(loader, 3))
    seen += list(itertools.islice(loader, 1))
    assert labels_of([*seen, *loader]) == whole
    assert loader.state_dict() == {**loader.state_dict(), "epoch": 1, "batch": 0}


def test_memory_of_a_batch_is_used_again_only_when_nothing_sees_it(plain):
    arguments: dict[str, Any] = {"batch_size": 8, "labels": True, **SMALL}
    kept = list(RowLoader(plain.path, "residual.1", **arguments))
    # Of the other loader's batches a view or its numpy array is all that is left.
    views = [(b["residual.1"][3:], b["invokes"].numpy()) for b in RowLoader(plain.path, "residual.1", **arguments)]
    for batch, (rows, invokes) in zip(kept, views, strict=True):
        assert torch.equal(rows.view(torch.int16), batch["residual.1"][3:].view(torch.int16))
        assert invokes.tolist() == batch["invokes"].tolist()


def test_budgets_beyond_the_run_take_no_more_than_the_run(plain):
    loader = RowLoader(plain.path, "attempt", batch_size=1 << 40, drop_last=False, buffer_bytes=1 << 60)
    [batch] = loader
    assert len(batch) == len(STORED)


def test_two_iterations_at_once_are_refused(plain):
    loader = RowLoader(plain.path, "attempt", batch_size=8, **SMALL)
    first = iter(loader)
    next(first)
    next(iter(loader))
    with pytest.raises(LoaderError, match="another iteration over this loader has begun"):
        next(first)


def test_log_probabilities_are_labels_where_the_run_has_them(plain):
    loader = RowLoader(plain.path, "attempt", batch_size=8, labels=True, drop_last=False, **SMALL)
    stored = harvest.open(plain.path).array("tokens/logprob", slice(None))
    found = torch.cat([batch["logprobs"] for batch in loader])
    assert found.dtype == torch.float32
    assert len(found) == loader.n_rows
    assert Counter(found[~found.isnan()].tolist()) <= Counter(stored[~np.isnan(stored)].tolist())


def test_batches_of_one_location_are_tensors_as_asked_for(plain):
    [first, *_] = harvest.open(plain.path).batches("residual.1", 16, dtype=torch.float32, device="cpu")
    assert (first.shape, first.dtype) == ((16, 32), torch.float32)
    [both, *_] = RowLoader(plain.path, ["attempt", "residual.1"], batch_size=4)
    assert {name: values.dtype for name, values in both.items()} == {
        "attempt": torch.float32,
        "residual.1": torch.bfloat16,
    }


def test_what_cannot_be_is_an_error_by_name(plain, tmp_path):
    with pytest.raises(StorageError, match=r"no location 'nothing'; it has"):
        RowLoader(plain.path, "nothing", batch_size=4)
    with pytest.raises(LoaderError, match="rank = 2 is not one of world_size = 2"):
        RowLoader(plain.path, "attempt", batch_size=4, rank=2, world_size=2)
    with pytest.raises(LoaderError, match="batch_size = 0"):
        RowLoader(plain.path, "attempt", batch_size=0)
    with pytest.raises(LoaderError, match="locations is empty"):
        RowLoader(plain.path, [], batch_size=4)
    script = ScriptedRun(locations=(LocationSpec(name="positions", path="model.pos", width=4),))
    clash = script.create(tmp_path / "run")
    script.finish(clash)
    with pytest.raises(LoaderError, match="positions: a label has this name; use another name of the location"):
        RowLoader(clash.path, "positions", batch_size=4, labels=True)
    assert len(list(RowLoader(clash.path, "model.pos", batch_size=4, labels=True))) > 4
    state = RowLoader(plain.path, "attempt", batch_size=4).state_dict()
    with pytest.raises(
        LoaderError, match="batch_size was 4, is 5; .*seed was 0, is 7|seed was 0, is 7; batch_size was 4"
    ):
        RowLoader(plain.path, "attempt", batch_size=5, seed=7).load_state_dict(state)


def test_damage_reaches_the_trainer_and_the_thread_ends(tmp_path):
    folder = SCRIPT.create(tmp_path / "run")
    SCRIPT.finish(folder)
    before = threading.active_count()
    [shard, *_] = sorted((folder.data / "acts" / "attempt").glob("c.*"))
    shard.write_bytes(shard.read_bytes()[:-20])
    with pytest.raises(DamagedError, match="truncated"):
        list(RowLoader(folder.path, "attempt", batch_size=8, **SMALL))
    whole = iter(RowLoader(folder.path, "residual.1", batch_size=8, **SMALL))
    next(whole)
    whole.close()  # type: ignore[attr-defined]
    assert threading.active_count() == before
