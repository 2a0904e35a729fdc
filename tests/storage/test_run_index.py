"""Statistics of a whole run: the file of a finished run says what its receipts say together."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from storage.errors import DamagedError
from storage.reader import StoreReader
from storage.run_folder import RunFolder
from storage.run_index import read_statistics, run_statistics

GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("name", ["v1-plain", "v1-zstd"])
def test_the_file_agrees_with_the_receipts(name: str) -> None:
    reader = StoreReader(GOLDEN / name)
    written = read_statistics(reader.run)
    merged = run_statistics(reader.layout, (reader.receipt(unit) for unit in sorted(reader.committed)))
    assert list(written) == list(merged)
    for location, statistics in written.items():
        other = merged[location]
        # The file was made by adding unit after unit, which rounds otherwise than all at once.
        assert (statistics.mean, statistics.variance) == pytest.approx((other.mean, other.variance))
        assert replace(statistics, mean=0, variance=0) == replace(other, mean=0, variance=0)


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"locations": {"residual.1": {}}}'])
def test_a_damaged_file_is_named(content: str | None, tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "v1-plain", tmp_path / "run")
    path = tmp_path / "run" / "statistics.json"
    path.unlink()
    if content is not None:
        path.write_text(content)
    with pytest.raises(DamagedError, match=r"statistics.json of the finished run cannot be read"):
        read_statistics(RunFolder.open(tmp_path / "run"))


def test_the_derived_values_stay_in_the_file() -> None:
    content = json.loads((GOLDEN / "v1-plain" / "statistics.json").read_text())["locations"]
    assert all({"norm_quantiles", "massive_rows"} <= each.keys() for each in content.values())
