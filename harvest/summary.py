"""The closing summary of a run, derived from its folder: what is stored, how fast it went, what to do next."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from harvest.run_profile import PROFILE_FILE


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """Totals of a run over all its sessions."""

    path: Path
    complete: bool
    n_units: int
    n_committed: int
    n_invokes: int
    """Planned invokes."""
    n_skipped: int
    n_stored_invokes: int
    n_tokens: int
    """Tokens that passed through the model for committed units."""
    n_rows: int
    """Stored rows of each location."""
    n_locations: int
    stored_bytes: int
    """Bytes of rows over all locations."""
    engine_s: float
    """Wall-clock seconds in which engines served, over all sessions."""
    n_engine_losses: int
    n_failed_attempts: int
    suspicious: dict[str, int]
    """Locations with non-finite or all-zero rows, and in how many units."""

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens a second while engines served."""
        return self.n_tokens / self.engine_s if self.engine_s > 0 else None


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """The events of a run; a line torn by a crash is passed over."""
    if not path.exists():
        return
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                continue


@dataclass(kw_only=True, slots=True)
class EventTotals:
    """Sums over the event stream; a unit counts once, by its last commit."""

    commits: dict[int, dict[str, Any]]
    engine_s: float
    n_engine_losses: int
    n_failed_attempts: int


def sum_events(events: Iterator[dict[str, Any]]) -> EventTotals:
    """Add up a run's events. Time counts from an engine's readiness to the last commit after it."""
    totals = EventTotals(commits={}, engine_s=0.0, n_engine_losses=0, n_failed_attempts=0)
    since: float | None = None
    for event in events:
        match event["event"]:
            case "session":
                since = None
            case "engine_ready":
                since = since or event["time_s"]
            case "commit":
                totals.commits[event["unit"]] = event
                if since is not None:
                    totals.engine_s += event["time_s"] - since
                    since = event["time_s"]
            case "engine_lost":
                totals.n_engine_losses += 1
            case "unit_failed":
                totals.n_failed_attempts += 1
    return totals


def print_summary(console: Console, summary: RunSummary) -> None:
    """Print the summary as a table with the next commands."""
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right", style="bold")
    table.add_column()
    done = "complete" if summary.complete else f"{summary.n_committed} of {summary.n_units} units committed"
    table.add_row("run", done)
    skipped = f" ({summary.n_skipped:,} skipped, listed in plan/skipped.parquet)" if summary.n_skipped else ""
    table.add_row("prompts", f"{summary.n_stored_invokes:,}{skipped}")
    table.add_row("tokens", f"{summary.n_tokens:,}")
    table.add_row(
        "rows", f"{summary.n_rows * summary.n_locations:,} ({summary.n_rows:,} at {summary.n_locations} locations)"
    )
    table.add_row("bytes", f"{summary.stored_bytes:,} ({format_bytes(summary.stored_bytes)})")
    if summary.tokens_per_s is not None:
        table.add_row("tokens/s", f"{summary.tokens_per_s:,.0f}")
    if summary.n_engine_losses or summary.n_failed_attempts:
        table.add_row("trouble", f"{summary.n_engine_losses} engines lost, {summary.n_failed_attempts} attempts failed")
    for location, n_units in summary.suspicious.items():
        where = f"{escape(location)}: non-finite or all-zero rows in {n_units} units"
        table.add_row("rows to look at", f"{where}; harvest inspect")
    path = escape(str(summary.path))
    table.add_row("path", path)
    if (summary.path / PROFILE_FILE).exists():
        table.add_row("profile", escape(str(summary.path / PROFILE_FILE)))
    console.print(table)
    if summary.complete:
        console.print(f"next: harvest verify {path} --parity 16 · harvest inspect {path}")
    else:
        console.print(f"next: the same command resumes the run · harvest status {path}")


def format_bytes(n_bytes: float) -> str:
    """Bytes in a readable unit."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if n_bytes < 1000 or unit == "TB":
            return f"{n_bytes:,.0f} {unit}" if unit == "B" else f"{n_bytes:,.2f} {unit}"
        n_bytes /= 1000
    raise AssertionError
