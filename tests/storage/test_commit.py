"""The committer: one driver, fenced attempts, receipts that must account for everything, recovery."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

from storage.commit import Committer
from storage.errors import LedgerError, ReceiptError, RunLockedError, StorageError
from storage.ledger import read_ledger
from storage.receipt import InvokeReceipt, UnitReceipt
from storage.run_folder import RunFolder
from storage.testing import ScriptedRun, store_suite
from storage.unit_writer import UnitWriter

SCRIPT = ScriptedRun(seed=11, n_units=3, rows_per_shard=64, shards_per_unit=2)


@pytest.fixture
def run(folder: Path) -> RunFolder:
    return SCRIPT.create(folder / "run")


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_suite(folder: Path, compression: Any) -> None:
    store_suite(ScriptedRun(seed=4, compression=compression), folder / "run")


def test_two_drivers_are_refused(run: RunFolder) -> None:
    with Committer.open(run):
        with pytest.raises(RunLockedError, match=r"Another driver \(pid \d+ on .*\) holds"):
            Committer.open(run, wait_s=0)
    Committer.open(run).close()


def _try_to_open(path: Path, answers: Any) -> None:
    try:
        Committer.open(RunFolder.open(path)).close()
        answers.put("opened")
    except RunLockedError as error:
        answers.put(str(error))


def test_a_driver_in_another_process_is_refused(run: RunFolder) -> None:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with Committer.open(run):
        other = context.Process(target=_try_to_open, args=(run.path, answers))
        other.start()
        assert "holds the run" in answers.get(timeout=60)
        other.join()


def test_attempt_numbers_survive_restarts(run: RunFolder) -> None:
    seen = set()
    for _ in range(3):
        with Committer.open(run) as committer:
            for unit in range(2):
                for _ in range(3):
                    seen.add((unit, committer.next_attempt(unit)))
    assert len(seen) == 18
    with Committer.open(run) as committer, pytest.raises(StorageError, match="Unit 3 does not exist"):
        committer.next_attempt(3)


def test_a_receipt_of_an_earlier_driver_is_dropped(run: RunFolder) -> None:
    with Committer.open(run) as committer:
        receipt = SCRIPT.attempt(run, 0, committer.next_attempt(0))
    with Committer.open(run) as committer:
        assert committer.publish([receipt]).dropped == ((0, receipt.attempt),)
        assert committer.committed == set()


def test_twins_in_one_group(run: RunFolder) -> None:
    with Committer.open(run) as committer:
        one, two = (SCRIPT.attempt(run, 0, committer.next_attempt(0)) for _ in range(2))
        published = committer.publish([one, two])
        assert published.committed == (0,)
        assert published.dropped == ((0, two.attempt),)
        assert not any(run.staging.iterdir())
    SCRIPT.assert_units(run)


def test_one_refused_receipt_does_not_stop_the_others(run: RunFolder) -> None:
    with Committer.open(run) as committer:
        bad = dataclasses.replace(SCRIPT.attempt(run, 0, committer.next_attempt(0)), invokes=())
        good = SCRIPT.attempt(run, 1, committer.next_attempt(1))
        published = committer.publish([bad, good])
        assert published.committed == (1,)
        assert "does not say how every planned invoke ended" in published.refused[0, bad.attempt]
        assert not any(run.staging.iterdir())


def wrong(receipt: UnitReceipt, what: str) -> UnitReceipt:
    """`receipt` with one thing wrong."""
    invokes = list(receipt.invokes)
    at = next(i for i, x in enumerate(invokes) if x.n_rows > 1)
    if what == "file missing":
        return dataclasses.replace(receipt, files=receipt.files[1:])
    if what == "file size":
        first = dataclasses.replace(receipt.files[0], file_bytes=receipt.files[0].file_bytes + 1)
        return dataclasses.replace(receipt, files=(first, *receipt.files[1:]))
    if what == "invoke missing":
        del invokes[at]
    elif what == "invoke twice":
        invokes.append(invokes[at])
    elif what == "fewer rows":
        invokes[at] = dataclasses.replace(invokes[at], n_rows=invokes[at].n_rows - 1, status="truncated")
    elif what == "short but ok":
        invokes[at] = dataclasses.replace(invokes[at], n_rows=0, status="ok")
    return dataclasses.replace(receipt, invokes=tuple(invokes))


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("file missing", "missing or foreign files"),
        ("file size", "where the receipt says"),
        ("invoke missing", "does not say how every planned invoke ended"),
        ("invoke twice", "does not say how every planned invoke ended"),
        ("fewer rows", "are not the rows of its invokes"),
        ("short but ok", "are planned|are not the rows"),
    ],
)
def test_a_receipt_must_account_for_its_unit(run: RunFolder, what: str, words: str) -> None:
    with Committer.open(run) as committer:
        receipt = SCRIPT.attempt(run, 0, committer.next_attempt(0))
        refused = committer.publish([wrong(receipt, what)]).refused
        assert len(refused) == 1
        assert re.search(words, next(iter(refused.values())))
        assert committer.committed == set()


def test_ranks_write_their_own_arrays(run: RunFolder) -> None:
    """Two ranks of one attempt: disjoint arrays, merged receipts, one unit."""
    arrays = list(run.layout.arrays)
    with Committer.open(run) as committer:
        attempt = committer.next_attempt(0)
        receipts = []
        for mine in (arrays[::2], arrays[1::2]):
            writer = UnitWriter(run.path, run.layout, unit=0, attempt=attempt, arrays=mine)
            for array, row, data in SCRIPT.writes(0, attempt, arrays=mine):
                writer.write(array, row, data)
            receipts.append(pickle.loads(pickle.dumps(writer.seal(invokes=SCRIPT.outcomes(0)))))
        assert committer.publish(receipts[:1]).refused
        attempt = committer.next_attempt(0)
        receipts = []
        for mine in (arrays[::2], arrays[1::2]):
            writer = UnitWriter(run.path, run.layout, unit=0, attempt=attempt, arrays=mine)
            for array, row, data in SCRIPT.writes(0, attempt, arrays=mine):
                writer.write(array, row, data)
            receipts.append(writer.seal(invokes=SCRIPT.outcomes(0)))
        merged = UnitReceipt.merge(receipts[::-1])
        assert UnitReceipt.from_json(json.loads(json.dumps(merged.to_json()))) == merged
        assert committer.publish([merged]).committed == (0,)
    SCRIPT.assert_units(run)


def test_merging_what_does_not_belong_together_is_refused(run: RunFolder) -> None:
    with Committer.open(run) as committer:
        receipt = SCRIPT.attempt(run, 0, committer.next_attempt(0))
    with pytest.raises(ReceiptError, match="two ranks report the same file"):
        UnitReceipt.merge([receipt, receipt])
    with pytest.raises(ReceiptError, match="different units or attempts"):
        UnitReceipt.merge([receipt, dataclasses.replace(receipt, attempt=1)])
    with pytest.raises(ReceiptError, match="No receipt"):
        UnitReceipt.merge([])
    with pytest.raises(ReceiptError, match="none of ok, skipped"):
        InvokeReceipt(invoke=0, n_rows=1, status="fine")


def test_finalise_needs_all_units_and_is_idempotent(run: RunFolder) -> None:
    with Committer.open(run) as committer:
        with pytest.raises(StorageError, match="3 of 3 units are not committed"):
            committer.finalise()
    SCRIPT.finish(run)
    ledger = run.ledger.read_bytes()
    with Committer.open(run) as committer:
        assert committer.complete
        committer.finalise()
    assert run.ledger.read_bytes() == ledger
    SCRIPT.assert_store(run)


def test_a_torn_tail_is_dropped_and_damage_before_it_refused(run: RunFolder) -> None:
    with Committer.open(run) as committer:
        for unit in range(2):
            committer.publish([SCRIPT.attempt(run, unit, committer.next_attempt(unit))])
    whole = run.ledger.read_bytes()
    run.ledger.write_bytes(whole[:-7])
    assert read_ledger(run.ledger).torn
    with Committer.open(run) as committer:
        assert committer.committed == {0}
    SCRIPT.finish(run)
    SCRIPT.assert_store(run)
    run.ledger.write_bytes(whole[:10] + b"X" + whole[11:])
    with pytest.raises(LedgerError, match="damaged before its end, near line"):
        Committer.open(run)
    run.ledger.unlink()
    with pytest.raises(LedgerError, match="is missing"):
        Committer.open(run)


def test_lost_receipts_are_refused(run: RunFolder) -> None:
    with Committer.open(run) as committer:
        committer.publish([SCRIPT.attempt(run, 0, committer.next_attempt(0))])
    run.receipts.write_bytes(run.receipts.read_bytes()[:-1])
    with pytest.raises(LedgerError, match="shorter than the ledger says"):
        Committer.open(run)


def test_results_override_the_index(run: RunFolder) -> None:
    import zarr

    with Committer.open(run) as committer:
        for unit in range(3):
            committer.publish([SCRIPT.attempt(run, unit, committer.next_attempt(unit))])
        committer.finalise([InvokeReceipt(invoke=0, n_rows=SCRIPT.invokes[0].n_rows, status="quarantined")])
    index = zarr.open_group(run.data, mode="r")["index"]
    names = index["status"].attrs["names"]
    status = [names[code] for code in index["status"][:]]
    expected = ["quarantined", *(x.status for x in SCRIPT.invokes[1:]), "skipped"]
    assert status == expected
    assert index["n_rows"][:].tolist() == [*(x.n_rows for x in SCRIPT.invokes), 0]
    assert index["row_start"][:].tolist() == [*(x.row_start for x in SCRIPT.invokes), -1]
    assert index["unit"][:].tolist() == [*(x.unit for x in SCRIPT.invokes), -1]
    assert index["n_prompt_tokens"][:].tolist() == [*(x.n_prompt for x in SCRIPT.invokes), 0]


def test_a_forked_child_does_not_keep_the_lock(run: RunFolder) -> None:
    """A child that outlives a killed driver must not keep the next driver out."""
    committer = Committer.open(run)
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(send)
        os.read(receive, 1)  # until the parent is done
        os._exit(0)
    with pytest.raises(RunLockedError):
        Committer.open(run, wait_s=0)
    committer.close()
    Committer.open(run).close()
    os.close(send)
    os.waitpid(child, 0)
    os.close(receive)
