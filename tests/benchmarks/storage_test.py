"""`make bench` runs the store's benchmarks too; nothing is asserted about time."""

from __future__ import annotations

import pytest

from tests.benchmarks.storage import run_all


@pytest.mark.bench
def test_storage() -> None:
    assert run_all(pairs=5, mib=256)["ratios"]
