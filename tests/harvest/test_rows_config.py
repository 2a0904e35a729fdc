"""`RowsConfig` gives the run its selection, and refuses early what cannot be placed."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from actors.selection import Selection
from harvest.config import CaptureConfig, GenerationConfig, RowsConfig, parse_config
from harvest.runs import _as_of_now


def test_settings_reach_the_selection() -> None:
    rows = RowsConfig(select="sample", source="both", sample=3, skip_first=2, skip_special_tokens=True)
    expected = Selection(select="sample", source="both", sample=3, skip_first=2, special_ids=(1, 2), seed=9)
    assert rows.selection(GenerationConfig(max_tokens=4), seed=9, special_ids=(2, 1)) == expected
    kept = RowsConfig(select="slice", start=1, stop=5).selection(GenerationConfig(), seed=0, special_ids=(2, 1))
    assert kept == Selection(select="slice", start=1, stop=5)
    assert RowsConfig(select="every", every=4).selection(GenerationConfig(), seed=0).every == 4


@pytest.mark.parametrize(
    ("generation", "exact"),
    [
        ({}, False),
        ({"ignore_eos": True}, True),
        ({"ignore_eos": True, "stop": ("x",)}, False),
        ({"min_tokens": 4}, True),
        ({"min_tokens": 3}, False),
    ],
)
def test_the_last_generated_row_needs_answers_of_one_length(generation: dict[str, Any], exact: bool) -> None:
    fields: dict[str, Any] = {
        "locations": ("residual.1",),
        "rows": {"select": "last", "source": "generated"},
        "generation": {"max_tokens": 4, **generation},
    }
    if exact:
        capture = CaptureConfig(**fields)
        selection = capture.rows.selection(capture.generation, seed=0)
        assert selection.positions(n_prompt_tokens=5, max_tokens=4, invoke=0).tolist() == [7]
    else:
        with pytest.raises(ValidationError, match="depends on where an answer ends"):
            CaptureConfig(**fields)


def test_settings_of_another_select_are_refused() -> None:
    with pytest.raises(ValidationError, match="start and stop belong to select"):
        CaptureConfig(locations=("residual.1",), rows=RowsConfig(start=3))


def test_a_plan_is_resumed_by_a_version_that_has_more_settings() -> None:
    raw = {
        "model": {"name": "m"},
        "dataset": {"path": "d"},
        "capture": {"locations": ["residual.1"]},
        "store": {"path": "s"},
    }
    config = parse_config(raw)
    planned = config.content()
    for name in ("reduce", "roles"):
        del planned["capture"]["rows"][name]
    del planned["capture"]["generation"]["logprobs"]
    assert _as_of_now(planned, config) == config.content()
    planned["capture"]["rows"]["select"] = "last"
    assert _as_of_now(planned, config)["capture"]["rows"]["select"] == "last"
    # Content that this version cannot read is compared as it is.
    assert _as_of_now({"of": "another version"}, config) == {"of": "another version"}
