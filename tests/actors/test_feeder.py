"""Feeder and sink over the scripted engine: units overlap, shortfalls are named, a stalled disk stops the engine."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from actors.fake_engine import Script, ScriptedLlm, scripted_rows
from actors.feeder import Feeder, read_planned
from actors.protocol import EngineSpec, Lease, UnitFailure
from actors.selection import Selection
from storage.commit import Committer
from storage.reader import StoreReader
from tests.harness import make_run

LOCATIONS = [
    SimpleNamespace(name=name, array=name, path=name, alias=None, width=64) for name in ("residual.0", "residual.1")
]


@pytest.fixture
def prompts():
    random = np.random.default_rng(0)
    return [random.integers(0, 1000, int(n)).tolist() for n in random.integers(1, 200, 40)]


def start(run, script=None, **changes):
    spec = EngineSpec(
        run_path=str(run.path),
        model="",
        locations=("residual.0", "residual.1"),
        layout=run.layout,
        **{"selection": Selection(), "sampling": {}, **changes},
    )
    llm = ScriptedLlm(spec, script or Script())

    read_unit = partial(read_planned, run.plan, unit_rows=run.layout.unit_rows)

    feeder = Feeder(llm, spec, read_unit)
    errors = []

    def loop():
        try:
            feeder.run()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()

    def stop():
        feeder.stop()
        thread.join(10)
        llm.close()
        return errors

    return feeder, llm, stop


def test_all_units_are_stored_as_scripted(prompts, tmp_path):
    run = make_run(tmp_path / "run", prompts, LOCATIONS, n_units=5)
    feeder, _, stop = start(run)
    with Committer.open(run) as committer:
        futures = [feeder.submit(Lease(unit=unit, attempt=committer.next_attempt(unit))) for unit in range(5)]
        receipts = [future.result(30) for future in futures]
        assert not committer.publish([receipt.storage for receipt in receipts]).refused
        committer.finalise()
    stop()
    reader = StoreReader(run)
    for invoke, prompt in enumerate(prompts):
        stored = reader.prompt(invoke)
        assert stored.token_ids.tolist() == prompt
        for index, location in enumerate(LOCATIONS):
            expected = scripted_rows(np.full(len(prompt), invoke), np.arange(len(prompt)), index, 64)
            np.testing.assert_array_equal(stored.rows[location.name], expected)
    assert sum(receipt.n_rows for receipt in receipts) == sum(map(len, prompts))


def test_a_tap_that_does_not_fire_fails_its_unit_by_name(prompts, tmp_path):
    run = make_run(tmp_path / "run", prompts, LOCATIONS, n_units=2)
    feeder, llm, stop = start(run)
    submit = llm._sink.submit
    dropped: list[str] = []

    def lose_one(batch):
        if not dropped:
            dropped.append(list(batch.rows)[-1])
            batch = replace(batch, rows={array: rows for array, rows in batch.rows.items() if array not in dropped})
        submit(batch)

    llm._sink.submit = lose_one
    results = [feeder.submit(Lease(unit=unit, attempt=1)).result(30) for unit in range(2)]
    stop()
    assert isinstance(results[0], UnitFailure)
    assert results[0].kind == "UnitIncomplete"
    assert dropped[0] in results[0].message
    assert not isinstance(results[1], UnitFailure)
    assert not list((run.staging).glob("0-1/**/c.*"))


def test_a_disk_that_refuses_fails_the_attempt_and_the_next_one_succeeds(prompts, tmp_path):
    run = make_run(tmp_path / "run", prompts, LOCATIONS)
    feeder, llm, stop = start(run)
    open_writer = llm._sink._open_writer

    def full_disk(unit, attempt):
        writer = open_writer(unit, attempt)
        if attempt == 1:

            def refuse(*arguments):
                raise OSError(28, "No space left on device")

            writer.write = refuse
        return writer

    llm._sink._open_writer = full_disk
    first = feeder.submit(Lease(unit=0, attempt=1)).result(30)
    second = feeder.submit(Lease(unit=0, attempt=2)).result(30)
    stop()
    assert isinstance(first, UnitFailure)
    assert "No space left" in first.message
    assert second.n_rows == sum(map(len, prompts))


def test_a_stalled_disk_stops_the_engine_within_its_ring(prompts, tmp_path):
    run = make_run(tmp_path / "run", prompts, LOCATIONS)
    step_bytes = ScriptedLlm.max_step_tokens * 2 * 64 * 4
    feeder, llm, stop = start(run, ring_bytes=3 * step_bytes, writer_threads=1)
    released = threading.Event()
    open_writer = llm._sink._open_writer

    def stall(unit, attempt):
        writer = open_writer(unit, attempt)
        write = writer.write

        def wait_and_write(*arguments):
            released.wait(60)
            write(*arguments)

        writer.write = wait_and_write
        return writer

    llm._sink._open_writer = stall
    future = feeder.submit(Lease(unit=0, attempt=1))
    deadline = time.monotonic() + 20
    while feeder.stats.gated_s == 0 and time.monotonic() < deadline:
        time.sleep(0.05)
    steps = llm._n_steps
    time.sleep(0.3)
    assert llm._n_steps == steps, "the engine went on although nothing could be written"
    assert 0 < llm._sink.pending_bytes <= 3 * step_bytes * 1.1
    assert not future.done()
    released.set()
    assert future.result(30).n_rows == sum(map(len, prompts))
    stop()


def test_a_ring_too_small_for_two_steps_is_refused_at_the_start(prompts, tmp_path):
    run = make_run(tmp_path / "run", prompts, LOCATIONS)
    with pytest.raises(ValueError, match=r"limits.ring_bytes = 1,000 cannot hold the rows of two steps"):
        start(run, ring_bytes=1000)


def test_an_engine_that_breaks_fails_everything_in_flight(prompts, tmp_path):
    run = make_run(tmp_path / "run", prompts, LOCATIONS, n_units=3)
    feeder, _, stop = start(run, Script(raise_on=frozenset([7])))
    futures = [feeder.submit(Lease(unit=unit, attempt=1)) for unit in range(3)]
    errors = [future.exception(30) for future in futures if future.exception(30)]
    assert errors
    assert all("scripted failure on invokes [7]" in str(error) for error in errors)
    assert [str(error) for error in stop()] == ["scripted failure on invokes [7]"]
