"""What finalising derives from the plan and the receipts: the per-invoke index arrays and the statistics file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from storage.errors import StorageError
from storage.format import INDEX_FILLS, STATUSES, StoreLayout, json_document, numpy_dtype
from storage.receipt import InvokeReceipt, UnitReceipt
from storage.run_folder import RunFolder
from storage.stats import LocationStatistics, merge_statistics

QUANTILES = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
_CODES = {name: code for code, name in enumerate(STATUSES)}


def index_arrays(
    run: RunFolder, receipts: Sequence[UnitReceipt], results: Iterable[InvokeReceipt] = ()
) -> dict[str, np.ndarray[Any, Any]]:
    """Values of `index/*`, each [P], by array path."""
    layout = run.layout
    values = {
        name: np.full(layout.n_invokes, INDEX_FILLS[name], numpy_dtype(spec.dtype))
        for name, spec in ((path.removeprefix("index/"), spec) for path, spec in layout.index_arrays.items())
    }
    values["status"][:] = _CODES["skipped"]
    plan: pa.Table = run.plan.summary()
    invokes = plan.column("invoke").to_numpy()
    if len(invokes) and (invokes.min() < 0 or invokes.max() >= layout.n_invokes):
        raise StorageError(f"The plan names invokes outside 0 to {layout.n_invokes - 1}; the index cannot be written.")
    for name in ("row_start", "n_prompt_tokens", "unit"):
        values[name][invokes] = plan.column(name).to_numpy()
    for receipt in receipts:
        for ended in receipt.invokes:
            values["n_rows"][ended.invoke] = ended.n_rows
            values["status"][ended.invoke] = _CODES[ended.status]
    for ended in results:
        values["n_rows"][ended.invoke] = ended.n_rows
        values["status"][ended.invoke] = _CODES[ended.status]
    return {f"index/{name}": value for name, value in values.items()}


def index_files(
    run: RunFolder, receipts: Sequence[UnitReceipt], results: Iterable[InvokeReceipt] = ()
) -> dict[str, bytes]:
    """Every file below `index/`, by path relative to the store."""
    files = dict(run.layout.index_documents())
    for path, values in index_arrays(run, receipts, results).items():
        spec = run.layout.index_arrays[path]
        step = spec.chunks[0]
        for number, start in enumerate(range(0, len(values), step)):
            chunk = np.full(step, spec.fill, spec.native)
            part = values[start : start + step]
            chunk[: len(part)] = part
            files[spec.file(number)] = chunk.tobytes()
    return files


def run_statistics(layout: StoreLayout, receipts: Iterable[UnitReceipt]) -> dict[str, LocationStatistics]:
    """Statistics of each location over the committed units, with row numbers over the whole store."""
    parts: dict[str, list[LocationStatistics]] = {location.name: [] for location in layout.locations}
    for receipt in receipts:
        start = layout.rows_of(receipt.unit).start
        for name, part in receipt.statistics.items():
            parts[name].append(part.shifted(start))
    return {name: merge_statistics(values) for name, values in parts.items()}


def statistics_document(layout: StoreLayout, receipts: Iterable[UnitReceipt]) -> bytes:
    """The content of `statistics.json`."""
    content: dict[str, Any] = {}
    for name, value in run_statistics(layout, receipts).items():
        quantiles = {f"{q:g}": value.norm_quantile(q) for q in QUANTILES} if value.norm_bins else {}
        content[name] = {
            **value.to_json(),
            "norm_quantiles": quantiles,
            "massive_rows": list(value.massive_rows()),
        }
    return json_document({"locations": content})
