"""`make bench` runs the blocks' benchmarks too; nothing is asserted about time."""

from __future__ import annotations

import pytest

from tests.benchmarks.blocks import run_all


@pytest.mark.bench
def test_blocks() -> None:
    assert run_all(pairs=9)["access"]["read_us"]
