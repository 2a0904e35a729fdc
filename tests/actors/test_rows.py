"""Row attribution: whatever the engine's batches look like, each wanted position is taken once, from its own row."""

import dataclasses

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actors.worker.rows import Registration, RowBook
from actors.worker.step import StepRows, StepRowsError


def make_step(entries):
    """A step from (request, first position, rows) in batch order."""
    counts = [n for _, _, n in entries]
    return StepRows.checked(
        request_ids=tuple(name for name, _, _ in entries),
        starts=np.concatenate([[0], np.cumsum(counts)]),
        first_positions=np.array([first for _, first, _ in entries]),
        scheduled={name: n for name, _, n in entries},
    )


def registration(invoke, positions, unit_row=0):
    return Registration(unit=1, attempt=2, invoke=invoke, unit_row=unit_row, positions=np.asarray(positions, np.int64))


@settings(suppress_health_check=[HealthCheck.large_base_example, HealthCheck.too_slow], deadline=None)
@given(data=st.data())
def test_chunks_preemption_and_order_never_move_a_row(data):
    """Simulates an engine that chunks, preempts and reorders; token value = (request, position)."""
    n_requests = data.draw(st.integers(1, 5))
    lengths = [data.draw(st.integers(1, 30)) for _ in range(n_requests)]
    wanted = [sorted(data.draw(st.sets(st.integers(0, n - 1)))) for n in lengths]
    book = RowBook()
    offsets = np.concatenate([[0], np.cumsum([len(w) for w in wanted])])
    for request in range(n_requests):
        if data.draw(st.booleans()) or request == 0:
            book.register(f"r{request}", registration(request, wanted[request], int(offsets[request])))
        else:
            wanted[request] = []
    store: dict[int, tuple[int, int]] = {}
    computed = [0] * n_requests
    while any(done < n for done, n in zip(computed, lengths, strict=True)):
        entries, content = [], []
        for request in data.draw(st.permutations(range(n_requests))):
            if data.draw(st.integers(0, 9)) == 0:
                computed[request] = 0  # preempted: positions run again
                book.register(f"r{request}", registration(request, wanted[request])) if f"r{request}" in book else None
            left = lengths[request] - computed[request]
            if left and data.draw(st.booleans()):
                n = data.draw(st.integers(1, left))
                entries.append((f"r{request}", computed[request], n))
                content += [(request, computed[request] + i) for i in range(n)]
                computed[request] += n
        if not entries:
            continue
        take = book.take(make_step(entries))
        if take is None:
            continue
        rows = [content[row] for row in take.source_rows]
        assert take.leading == (take.source_rows.tolist() == list(range(len(rows))))
        assert list(zip(take.invokes.tolist(), take.positions.tolist(), strict=True)) == rows
        assert take.segments.attempts == ((1, 2),)
        for place, source in zip(*(each.tolist() for each in take.segments.rows()), strict=True):
            assert place not in store
            store[place] = rows[source]
    expected = [(request, position) for request in range(n_requests) for position in wanted[request]]
    if all(wanted):
        assert [store[row] for row in sorted(store)] == expected
    assert sorted(store.values()) == sorted(expected)


def test_a_gap_in_positions_is_an_error():
    book = RowBook()
    book.register("a", registration(5, range(10)))
    with pytest.raises(StepRowsError, match=r"invoke 5 of unit 1: positions 0..3 never passed"):
        book.take(make_step([("a", 4, 2)]))


def test_foreign_and_forgotten_requests_get_no_rows():
    book = RowBook()
    book.register("a", registration(5, range(10)))
    assert book.take(make_step([("warm-up", 0, 3)])) is None
    book.forget(["a"])
    assert book.take(make_step([("a", 0, 3)])) is None


def test_segments_name_their_attempts():
    book = RowBook()
    for invoke, (unit, positions) in enumerate([(1, range(3)), (4, [0, 2]), (1, [1])]):
        registered = registration(invoke, list(positions), unit_row=10 * invoke)
        book.register(f"r{invoke}", dataclasses.replace(registered, unit=unit))
    segments = book.take(make_step([("r0", 0, 3), ("r1", 0, 3), ("r2", 0, 2)])).segments
    assert segments.attempts == ((1, 2), (4, 2))
    assert segments.attempt_of.tolist() == [0, 1, 0]
    other = segments.chosen(segments.attempt_of == 1)
    assert [each.tolist() for each in other.rows()] == [[10, 11], [3, 4]]


def test_slots_are_reused_and_grow_with_the_requests_in_flight():
    book = RowBook()
    for invoke in range(1000):
        book.register(f"r{invoke}", registration(invoke, [0, 1], unit_row=2 * invoke))
        if invoke >= 100:
            book.forget([f"r{invoke - 100}"])
    assert book._columns.shape[1] == 128
    take = book.take(make_step([(f"r{invoke}", 0, 2) for invoke in range(890, 1000)]))
    assert take.invokes.tolist() == [invoke for invoke in range(900, 1000) for _ in range(2)]
    assert take.segments.rows()[0].tolist() == list(range(1800, 2000))


def test_sampled_rows_are_the_last_of_each_request():
    book = RowBook()
    book.register("a", registration(1, [0, 2]))
    book.register("b", registration(2, [3], unit_row=10))
    take = book.take(make_step([("x", 0, 2), ("a", 0, 3), ("b", 0, 4)]))
    assert take.sampled_rows.tolist() == [-1, 1, 2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"starts": np.array([0, 2, 4])}, "are not what was scheduled"),
        ({"starts": np.array([1, 2, 5])}, "row offsets"),
        ({"first_positions": np.array([0])}, "first positions"),
        ({"first_positions": np.array([0, -1])}, "negative"),
        ({"scheduled": {"a": 2}}, "scheduled"),
    ],
)
def test_contradicting_numbers_are_refused(changes, message):
    arguments = {
        "request_ids": ("a", "b"),
        "starts": np.array([0, 2, 5]),
        "first_positions": np.array([0, 7]),
        "scheduled": {"a": 2, "b": 3},
    }
    with pytest.raises(StepRowsError, match=message):
        StepRows.checked(**{**arguments, **changes})
