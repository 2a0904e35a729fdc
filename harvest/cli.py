"""The command line. Every command prints what it found and what to do next; errors come without a traceback.

Exit codes: 0 done; 1 an error, or damage found by `verify`; 2 wrong usage; 3 a signal ended the run before it was
complete.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from harvest.errors import HarvestError

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__, rich_markup_mode="rich")
models_app = typer.Typer(no_args_is_help=True, help="Small real models that need no hub.")
app.add_typer(models_app, name="models")
# Where there is no terminal, tables must not be squeezed into 80 columns.
# Without emoji: `:100:` in an error or a path is text.
console = Console(highlight=False, emoji=False, soft_wrap=True, width=None if sys.stdout.isatty() else 160)

ConfigPath = Annotated[Path, typer.Argument(help="The run's TOML file.", metavar="CONFIG")]
RunPath = Annotated[Path, typer.Argument(help="The run folder.", metavar="RUN")]
Overrides = Annotated[list[str], typer.Option("--set", help="Override: section.key=value. May be repeated.")]
DRAINED_EXIT = 3


@app.command()
def plan(config: ConfigPath, overrides: Overrides = []) -> None:  # noqa: B006 - typer reads the default
    """Make the run folder and its plan: invokes, units, rows, bytes. No engine starts."""
    from harvest.config import load_config
    from harvest.runs import open_or_plan

    planned = open_or_plan(load_config(config, overrides), console)
    _print_plan(planned)


@app.command()
def run(
    config: ConfigPath,
    overrides: Overrides = [],  # noqa: B006 - typer reads the default
    profile: Annotated[bool, typer.Option("--profile", help="Say where the engines' time went.")] = False,
) -> None:
    """Harvest. Plans first where there is no plan; the same command resumes a run that was stopped."""
    from harvest.config import load_config
    from harvest.runs import run as run_harvest
    from harvest.summary import print_summary

    summary = run_harvest(load_config(config, overrides), console, profile=profile)
    print_summary(console, summary)
    if not summary.complete:
        raise typer.Exit(DRAINED_EXIT)


@app.command()
def status(run: RunPath) -> None:
    """How far a run is, from its folder alone."""
    from harvest.runs import summarise
    from harvest.summary import print_summary

    print_summary(console, summarise(run))


@app.command()
def verify(
    run: RunPath,
    parity: Annotated[int, typer.Option(help="Recompute so many random prompts with transformers.", min=0)] = 0,
    seed: Annotated[int, typer.Option(help="Chooses the prompts of --parity.")] = 0,
    report: Annotated[Path | None, typer.Option("--json", help="Write the report as JSON.")] = None,
) -> None:
    """Check every byte, row and label of a run; with --parity also the values."""
    from harvest.verification import verify_run

    outcome = verify_run(run, parity=parity, seed=seed)
    outcome.print(console)
    if report is not None:
        try:
            report.write_text(json.dumps(outcome.to_json(), indent=2), encoding="utf-8")
        except OSError as error:
            raise HarvestError(f"the report cannot be written to {report}: {error.strerror}; it is above") from error
    if not outcome.passed:
        raise typer.Exit(1)


@app.command()
def inspect(
    run: RunPath,
    invoke: Annotated[int | None, typer.Option(help="Show one invoke's tokens and row norms.")] = None,
) -> None:
    """What a run holds: arrays, statistics per location, or one invoke."""
    from harvest.inspection import print_invoke, print_run

    if invoke is None:
        print_run(console, run)
    else:
        print_invoke(console, run, invoke)


@app.command()
def locations(
    model: Annotated[str, typer.Argument(help="Name, folder or Hugging Face id.", metavar="MODEL")],
) -> None:
    """Print a model's module tree with every location, its width and aliases. Needs no weights and no GPU."""
    from harvest.inspection import print_locations

    print_locations(console, model)


@models_app.command("get")
def models_get(name: Annotated[str, typer.Argument(help="A name from `harvest models list`.")]) -> None:
    """Download a model, check it, and write it as a normal model folder into the cache."""
    from harvest.models import get_model

    console.print(escape(str(get_model(name))))


@models_app.command("list")
def models_list() -> None:
    """The models that `harvest models get` knows."""
    from harvest.models import list_models

    table = Table("name", "licence", "what", "in the cache")
    for entry in list_models():
        table.add_row(entry.name, entry.license, entry.description, escape(str(entry.path or "no")))
    console.print(table)


def _print_plan(planned: object) -> None:
    from harvest.runs import PlannedRun
    from harvest.summary import format_bytes

    assert isinstance(planned, PlannedRun)
    layout = planned.layout
    table = Table.grid(padding=(0, 2))
    table.add_column(justify="right", style="bold")
    table.add_column()
    table.add_row("run folder", escape(str(planned.path)))
    table.add_row("prompts", f"{planned.n_invokes:,} planned, {planned.n_skipped:,} skipped")
    table.add_row("tokens", f"{planned.n_prompt_tokens:,} of prompts")
    table.add_row("rows", f"{planned.n_rows:,} at each of {len(layout.locations)} locations")
    for location in layout.locations:
        table.add_row("location", f"{location.name}  width {location.width}  {location.dtype}")
    table.add_row("units", f"{layout.n_units:,} of {layout.unit_rows:,} rows ({layout.shards_per_unit} shards each)")
    predicted = layout.predicted_bytes(planned.n_rows)
    table.add_row("bytes", f"{predicted:,} ({format_bytes(predicted)}) in {layout.n_files:,} shard files")
    console.print(table)
    console.print("next: harvest run with the same configuration")


def main() -> None:
    """Entry point of the `harvest` command."""
    # Workers started by Ray must use this very interpreter, not one made anew by uv.
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    logging.basicConfig(level=logging.WARNING)
    from storage.errors import StorageError

    try:
        app()
    except (HarvestError, StorageError) as error:
        errors = Console(stderr=True, highlight=False, emoji=False, soft_wrap=True)
        errors.print(f"[bold red]error:[/] {escape(str(error))}")
        sys.exit(1)


if __name__ == "__main__":
    main()
