"""Names of locations as text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.location_errors import UnknownLocation, UnreadableLocation
from actors.worker.locations.location import array_name
from actors.worker.locations.syntax import AliasName, PathName, format_path, numbers, parse, part_matches


@pytest.mark.parametrize(
    ("name", "module", "side", "element"),
    [
        ("model.layers.3.output[0]", "model.layers.3", "output", (0,)),
        ("model.layers.3.self_attn.attn.inputs[0][2]", "model.layers.3.self_attn.attn", "inputs", (0, 2)),
        ("a.inputs[1][hidden_states]", "a", "inputs", (1, "hidden_states")),
        ("a.inputs[1]['hidden_states']", "a", "inputs", (1, "hidden_states")),
        ("a.input", "a", "input", ()),
        ("a.output[-1]", "a", "output", (-1,)),
        ("model.layers.*.mlp.output", "model.layers.*.mlp", "output", ()),
        ("model.layers.0:4.mlp.output", "model.layers.0:4.mlp", "output", ()),
    ],
)
def test_paths(name: str, module: str, side: str, element: tuple[int | str, ...]) -> None:
    assert parse(name) == PathName(module=module, side=side, element=element)


def test_aliases() -> None:
    assert parse("embed") == AliasName(alias="embed", layers=None)
    assert parse("residual.7") == AliasName(alias="residual", layers="7")
    assert parse("residual.*") == AliasName(alias="residual", layers="*")
    assert parse("residual.0:12:2") == AliasName(alias="residual", layers="0:12:2")


@pytest.mark.parametrize("name", ["", ".output", "model.layers.1.mlp", "residual.x", "a.output[0:2]", "a.output[]"])
def test_what_is_no_location_is_refused(name: str) -> None:
    with pytest.raises(UnknownLocation):
        parse(name)


@given(
    count=st.integers(1, 50),
    start=st.none() | st.integers(0, 60),
    stop=st.none() | st.integers(0, 60),
    step=st.none() | st.integers(1, 9),
)
def test_ranges_are_pythons_slices_that_never_run_past_the_model(
    count: int, start: int | None, stop: int | None, step: int | None
) -> None:
    text = ":".join("" if bound is None else str(bound) for bound in (start, stop, step))
    wanted = list(range(start or 0, count if stop is None else stop, step or 1))
    if wanted and max(wanted) < count:
        assert numbers("residual", text, count) == wanted
        matched = [n for n in range(count) if part_matches(text, str(n))]
        assert matched == wanted
    else:
        with pytest.raises(UnknownLocation):
            numbers("residual", text, count)


@given(
    path=st.lists(st.sampled_from(["model", "layers", "3", "mlp", "q_proj"]), min_size=1).map(".".join),
    side=st.sampled_from(["output", "input", "inputs"]),
    element=st.lists(st.integers(0, 9) | st.sampled_from(["x", "hidden_states"])).map(tuple),
)
def test_canonical_names_read_back(path: str, side: str, element: tuple[int | str, ...]) -> None:
    name = format_path(path, side, element)
    assert parse(name) == PathName(module=path, side=side, element=element)
    array = array_name(name)
    assert array.startswith(path) and not set(array) & set("[]'\"/ ")


def test_a_name_that_no_store_can_hold_is_refused() -> None:
    with pytest.raises(UnreadableLocation, match="name of an array"):
        array_name("a/../b.output")
