"""The sink: small pieces become the same rows; a failed attempt is dropped after its writers have left it."""

from __future__ import annotations

import threading
import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.host_rows import ArrayRows
from actors.protocol import InvokeOutcome, UnitFailure
from actors.row_joiner import RowJoiner
from actors.sink import Sink, StepBatch
from actors.worker.segments import Segments


class MemoryWriter:
    """Keeps rows in memory; counts writes."""

    sealed_files = 0

    def __init__(self, n_rows: int) -> None:
        self.rows = np.full((n_rows, 4), -1.0, np.float32)
        self.writes: list[tuple[int, int]] = []
        self.aborted = False
        self.inside = 0

    def write(self, array, row, data):
        assert not self.aborted
        assert (self.rows[row : row + len(data)] == -1).all(), "written twice"
        self.rows[row : row + len(data)] = data
        self.writes.append((row, len(data)))

    def clear(self, array, row, n):
        self.rows[row : row + n] = -1

    def mask(self, array):
        return self.rows[:, 0] != -1

    def abort(self):
        assert self.inside == 0, "aborted under a thread that writes"
        self.aborted = True


def make_sink(writer, **changes):
    return Sink(
        seal_writer=lambda writer, outcomes: "receipt",
        arrays=["a"],
        **{"open_writer": lambda unit, attempt: writer, "threads": 3, **changes},
    )


def outcome(n_rows, **changes):
    fields = {"invoke": 0, "unit_row": 0, "n_planned_rows": n_rows, "n_rows": n_rows, "status": "ok"}
    return InvokeOutcome(**{**fields, **changes})


def wait_for_result(sink):
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if results := sink.poll():
            return results[0]
        time.sleep(0.005)
    raise AssertionError("no result")


def submit(sink, pieces, expected):
    """One batch of (first row, rows), as of one step."""
    rows = np.concatenate([expected[row : row + count] for row, count in pieces])
    counts = np.array([count for _, count in pieces])
    segments = Segments.of(
        units=np.zeros(len(pieces), np.int64),
        attempts=np.ones(len(pieces), np.int64),
        unit_rows=np.array([row for row, _ in pieces]),
        begins=np.cumsum(counts) - counts,
        counts=counts,
    )
    sink.submit(StepBatch(rows={"a": ArrayRows(rows)}, segments=segments))


@pytest.mark.parametrize("join_bytes", [0, 1 << 20])
def test_pieces_of_a_decode_are_joined_and_complete(join_bytes):
    n_requests, n_tokens = 16, 100
    expected = np.arange(n_requests * n_tokens * 4, dtype=np.float32).reshape(-1, 4)
    writer = MemoryWriter(len(expected))
    sink = make_sink(writer, join_bytes=join_bytes)
    sink.open_unit(0, 1)
    for token in range(n_tokens):
        submit(sink, [(request * n_tokens + token, 1) for request in range(n_requests)], expected)
    sink.seal(0, 1, [outcome(len(expected))])
    result = wait_for_result(sink)
    sink.close()
    assert result.receipt == "receipt"
    np.testing.assert_array_equal(writer.rows, expected)
    assert sink.pending_bytes == 0
    if join_bytes:
        assert len(writer.writes) < len(expected) / 8


@given(data=st.data())
def test_joined_runs_hold_every_row_once(data):
    starts = data.draw(st.lists(st.integers(0, 200), unique=True, max_size=60))
    joiner = RowJoiner()
    for row in starts:
        joiner.add(np.array([row]), np.array([row]))
    assert joiner.n_bytes == 8 * len(starts)
    runs = list(joiner.drain())
    assert sorted(starts) == [row + i for row, run in runs for i in range(len(run))]
    assert [value for _, run in runs for value in run] == sorted(starts)
    assert all(later > row + len(run) for (row, run), (later, _) in pairwise(runs))
    assert joiner.n_bytes == 0
    assert list(joiner.drain()) == []


def test_rows_beyond_an_early_end_become_holes():
    expected = np.arange(80, dtype=np.float32).reshape(-1, 4)
    writer = MemoryWriter(20)
    sink = make_sink(writer)
    sink.open_unit(0, 1)
    submit(sink, [(0, 10), (10, 1), (11, 1)], expected)
    sink.seal(0, 1, [outcome(11, n_planned_rows=20, may_have_surplus=True)])
    assert not isinstance(wait_for_result(sink), UnitFailure)
    sink.close()
    assert writer.mask("a").tolist() == [True] * 11 + [False] * 9


def test_a_failed_attempt_is_aborted_after_its_writers_have_left():
    release = threading.Event()

    class SlowThenFull(MemoryWriter):
        def write(self, array, row, data):
            self.inside += 1
            try:
                if row == 0:
                    raise OSError(28, "No space left on device")
                release.wait(5)
            finally:
                self.inside -= 1

    writer = SlowThenFull(100)
    sink = make_sink(writer)
    sink.open_unit(0, 1)
    expected = np.zeros((100, 4), np.float32)
    submit(sink, [(50, 20)], expected)
    submit(sink, [(0, 10)], expected)
    early = []
    for _ in range(10):
        early += sink.poll()
        time.sleep(0.02)
    assert early == []
    was_aborted = writer.aborted
    release.set()
    assert not was_aborted
    failure = wait_for_result(sink)
    assert isinstance(failure, UnitFailure)
    assert "No space left" in failure.message
    assert writer.aborted
    sink.close()


def test_no_call_waits_for_a_slow_file_system():
    """Opening hangs; the engine goes on, and its rows are counted as pending until they are written."""
    release = threading.Event()
    writer = MemoryWriter(20)

    def open_slowly(unit, attempt):
        release.wait(10)
        return writer if unit == 0 else MemoryWriter(20)

    sink = make_sink(writer, open_writer=open_slowly)
    expected = np.arange(80, dtype=np.float32).reshape(-1, 4)
    sink.open_unit(0, 1)
    sink.open_unit(1, 1)
    submit(sink, [(0, 20)], expected)
    sink.abort(1, 1)
    sink.seal(0, 1, [outcome(20)])
    assert sink.poll() == []
    assert sink.pending_bytes == expected.nbytes
    release.set()
    assert wait_for_result(sink).receipt == "receipt"
    sink.close()
    np.testing.assert_array_equal(writer.rows, expected)


@pytest.mark.parametrize("with_rows", [False, True])
def test_files_that_cannot_be_opened_fail_their_attempt(with_rows):
    def refuse(unit, attempt):
        raise PermissionError(13, "Permission denied")

    sink = make_sink(None, open_writer=refuse)
    sink.open_unit(0, 1)
    if with_rows:
        submit(sink, [(0, 10)], np.zeros((10, 4), np.float32))
    failure = wait_for_result(sink)
    assert isinstance(failure, UnitFailure)
    assert "Permission denied" in failure.message
    sink.seal(0, 1, [outcome(10)])  # the failure is said once
    assert sink.poll() == []
    sink.close()
    assert sink.pending_bytes == 0
