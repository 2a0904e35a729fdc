"""What finalising derives from the plan and the receipts: the per-invoke index arrays and the statistics file."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa

from storage.errors import DamagedError, StorageError
from storage.format import INDEX_FILLS, STATUSES, StoreLayout, json_document, numpy_dtype
from storage.receipt import InvokeReceipt, UnitReceipt
from storage.run_folder import RunFolder
from storage.stats import LocationStatistics, merge_statistics

QUANTILES = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
# In the file beside the statistics that they are computed from.
_DERIVED = ("norm_quantiles", "massive_rows")
_CODES = {name: code for code, name in enumerate(STATUSES)}


class RunSummary:
    """Gathers, one unit at a time, what finalising writes; holds a few bytes an invoke, whatever the receipts' size."""

    def __init__(self, run: RunFolder) -> None:
        self._layout = layout = run.layout
        self._values = {
            name: np.full(layout.n_invokes, INDEX_FILLS[name], numpy_dtype(spec.dtype))
            for name, spec in ((path.removeprefix("index/"), spec) for path, spec in layout.index_arrays.items())
        }
        self._values["status"][:] = _CODES["skipped"]
        plan: pa.Table = run.plan.summary()
        invokes = plan.column("invoke").to_numpy()
        if len(invokes) and (invokes.min() < 0 or invokes.max() >= layout.n_invokes):
            raise StorageError(f"The plan names invokes outside 0 to {layout.n_invokes - 1}; no index can be written.")
        for name in ("row_start", "n_prompt_tokens", "unit"):
            self._values[name][invokes] = plan.column(name).to_numpy()
        self._statistics = {location.name: LocationStatistics() for location in layout.locations}

    def add_unit(self, unit: int, invokes: Iterable[InvokeReceipt], statistics: dict[str, LocationStatistics]) -> None:
        """Take in how the invokes of `unit` ended and its statistics."""
        for ended in invokes:
            self.add_invoke(ended)
        start = self._layout.rows_of(unit).start
        for name, part in statistics.items():
            self._statistics[name] = merge_statistics([self._statistics[name], part.shifted(start)])

    def add_invoke(self, ended: InvokeReceipt) -> None:
        """Take in how one invoke ended; the last word counts."""
        self._values["n_rows"][ended.invoke] = ended.n_rows
        self._values["status"][ended.invoke] = _CODES[ended.status]

    def index_files(self) -> dict[str, bytes]:
        """Every file below `index/`, by path relative to the store."""
        files = dict(self._layout.index_documents())
        for path, spec in self._layout.index_arrays.items():
            values = self._values[path.removeprefix("index/")]
            step = spec.chunks[0]
            for number, start in enumerate(range(0, len(values), step)):
                chunk = np.full(step, spec.fill, spec.native)
                part = values[start : start + step]
                chunk[: len(part)] = part
                files[spec.file(number)] = chunk.tobytes()
        return files

    def statistics_document(self) -> bytes:
        """The content of `statistics.json`: each location over the committed units, rows over the whole store."""
        return statistics_document(self._statistics)


def run_statistics(layout: StoreLayout, receipts: Iterable[UnitReceipt]) -> dict[str, LocationStatistics]:
    """Statistics of each location over the units of `receipts`, with row numbers over the whole store."""
    parts: dict[str, list[LocationStatistics]] = {location.name: [] for location in layout.locations}
    for receipt in receipts:
        start = layout.rows_of(receipt.unit).start
        for name, part in receipt.statistics.items():
            parts[name].append(part.shifted(start))
    return {name: merge_statistics(values) for name, values in parts.items()}


def statistics_document(statistics: dict[str, LocationStatistics]) -> bytes:
    """Statistics by location name, with norm quantiles and massive rows, as JSON."""
    content: dict[str, Any] = {}
    for name, value in statistics.items():
        quantiles = {f"{q:g}": value.norm_quantile(q) for q in QUANTILES} if value.norm_bins else {}
        content[name] = {
            **value.to_json(),
            "norm_quantiles": quantiles,
            "massive_rows": list(value.massive_rows()),
        }
    return json_document({"locations": content})


def read_statistics(run: RunFolder) -> dict[str, LocationStatistics]:
    """What `statistics.json` of a finished run says of each location; `DamagedError` where it cannot be read."""
    try:
        locations = json.loads(run.statistics.read_bytes())["locations"]
        return {
            name: LocationStatistics.from_json({key: value for key, value in each.items() if key not in _DERIVED})
            for name, each in locations.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{run.statistics} of the finished run cannot be read: {error}") from error
