"""`harvest inspect` and `harvest locations`: what a run holds, and what a model offers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from storage.reader import StoreReader
from storage.run_index import read_statistics, run_statistics


def print_run(console: Console, path: Path | str) -> None:
    """Arrays and statistics of a run."""
    reader = StoreReader(path)
    layout = reader.layout
    console.print(
        f"{escape(str(path))}: {len(reader.committed):,} of {layout.n_units:,} units, {layout.rows_per_shard:,} rows a "
        f"shard, {layout.shards_per_unit} shards a unit, plan {layout.plan_hash[:12]}"
    )
    arrays = Table("array", "shape", "dtype")
    for spec in layout.arrays.values():
        arrays.add_row(spec.path, str(spec.shape), spec.dtype)
    console.print(arrays)
    if reader.complete:
        statistics = read_statistics(reader.run)
    else:
        statistics = run_statistics(layout, (reader.receipt(unit) for unit in sorted(reader.committed)))
    table = Table("location", "rows", "mean", "std", "norm p50", "norm p99", "max |x|", "non-finite", "all zero")
    for location in layout.locations:
        stats = statistics[location.name]
        table.add_row(
            location.name,
            f"{stats.rows:,}",
            f"{stats.mean:.4g}",
            f"{stats.variance**0.5:.4g}",
            f"{stats.norm_quantile(0.5):.4g}",
            f"{stats.norm_quantile(0.99):.4g}",
            f"{stats.max_abs:.4g}",
            f"{stats.nonfinite_rows:,}",
            f"{stats.zero_rows:,}",
        )
    console.print(table)
    skipped = reader.run.plan.skipped()
    if len(skipped):
        console.print(f"{len(skipped):,} skipped records:")
        for row in skipped.slice(0, 10).to_pylist():
            console.print(f"  record {row['invoke']}: {row['reason']}, {escape(str(row['detail']))}")


def print_invoke(console: Console, path: Path | str, invoke: int) -> None:
    """Tokens of one invoke and the norm of each row."""
    prompt = StoreReader(path).prompt(invoke)
    console.print(
        f"invoke {invoke} (key {escape(str(prompt.key))}): unit {prompt.unit}, rows {prompt.row_start:,}.."
        f"{prompt.row_start + len(prompt.positions) - 1:,}, {prompt.n_prompt_tokens:,} prompt tokens"
    )
    logprobs = {} if prompt.logprobs is None else {"logprob": prompt.logprobs}
    table = Table("position", "token id", *logprobs, *(escape(f"|{name}|") for name in prompt.rows))
    norms = {name: np.linalg.norm(np.asarray(rows, np.float32), axis=1) for name, rows in prompt.rows.items()}
    for index, (position, token) in enumerate(zip(prompt.positions, prompt.token_ids, strict=True)):
        values = [*(each[index] for each in logprobs.values()), *(norms[name][index] for name in prompt.rows)]
        table.add_row(str(position), str(token), *(f"{value:.4g}" for value in values))
    console.print(table)


def print_locations(console: Console, model: str) -> None:
    """Every location of a model; see `actors.locations_probe`."""
    from actors.locations_probe import ProbeError
    from harvest.errors import ModelError
    from harvest.locations_cache import find_modules
    from harvest.models import resolve_model

    # A folder with no more than a config has locations too, though it is no model that could be run.
    folder = Path(model).expanduser()
    named = str(folder) if (folder / "config.json").is_file() else resolve_model(model)
    try:
        rows: list[dict[str, Any]] = find_modules(named)
    except ProbeError as error:
        raise ModelError(str(error)) from error
    table = Table("module", "class", "locations", "aliases")
    for row in rows:
        table.add_row(*(escape(row[column]) for column in ("module", "class", "locations", "aliases")))
    console.print(table)
