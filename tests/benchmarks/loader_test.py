"""`make bench` runs the loader's benchmarks too; nothing is asserted about time."""

from __future__ import annotations

import pytest

from tests.benchmarks.loader import run_all


@pytest.mark.bench
def test_loader() -> None:
    assert len(run_all(pairs=3, mib=256)) == 3
