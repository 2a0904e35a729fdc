"""Runs: plan, harvest, resume, summarise. What the command line and scripts call.

A run folder is resumed only under the content it was planned with; settings that decide speed may change.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from actors.lora import AdapterError
from actors.model_files import ModelChanged, check_model
from actors.protocol import EngineSpec
from actors.selection import Selection
from harvest.commits import total_units
from harvest.config import RunConfig, parse_config
from harvest.dataset import open_dataset
from harvest.errors import ConfigError, DatasetError, PlanError
from harvest.events import EventLog
from harvest.model_config import planned_revision
from harvest.planning import file_states, find_adapter, make_plan, refuse_engine_arguments
from harvest.progress import ProgressView
from harvest.summary import RunSummary, read_events, sum_events
from storage.commit import Committer
from storage.format import StoreLayout
from storage.ledger import read_ledger
from storage.run_folder import RunFolder


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRun:
    """A run folder and the totals of its plan."""

    path: Path
    layout: StoreLayout
    n_invokes: int
    n_skipped: int
    n_prompt_tokens: int
    n_rows: int
    new: bool
    """Made by this call."""


def open_or_plan(config: RunConfig, console: Console | None = None) -> PlannedRun:
    """The run folder of a configuration, made when it is not there.

    Raises:
        PlanError: the folder holds a run of another content; the message lists the differences.
    """
    path = Path(config.store.path)
    new = not RunFolder.exists(path)
    if new:
        folder = make_plan(config, partial(_say, console))
    else:
        refuse_engine_arguments(config)
        folder = RunFolder.open(path)
        _refuse_other_content(folder, config)
        _refuse_other_dataset(folder, config)
        _refuse_other_adapter(folder, config)
    return PlannedRun(
        path=path,
        layout=folder.layout,
        n_invokes=folder.run["n_invokes"],
        n_skipped=folder.run["n_skipped"],
        n_prompt_tokens=folder.run["n_prompt_tokens"],
        n_rows=folder.run["n_rows"],
        new=new,
    )


def run(config: RunConfig, console: Console | None = None, *, profile: bool = False) -> RunSummary:
    """Harvest a configuration to its end, or resume it.

    Args:
        config: of the run.
        console: where to print; nowhere without one.
        profile: print where the engines' time went, and write it to `profile.json` in the run folder.

    Raises:
        HarvestError: the run cannot begin, or stopped; committed units stay and the same call resumes.
        StorageError: the folder is damaged, locked by another driver, or cannot be written.
    """
    console = console or Console(quiet=True)
    planned = open_or_plan(config, console)
    folder = RunFolder.open(planned.path)
    state = read_ledger(folder.ledger)
    if state.complete is not None:
        console.print(f"{escape(str(planned.path))} is complete already; no engine was started.")
        return summarise(planned.path)
    with Committer.open(folder) as committer:
        totals = total_units(folder, committer.units, sum_events(read_events(folder.events)).commits)
        before = sum(unit.n_tokens for unit in totals.values())
        if committer.committed:
            console.print(f"resuming: {len(committer.committed):,} of {folder.layout.n_units:,} units are committed")
        view = ProgressView(console, n_tokens=planned.n_prompt_tokens, n_committed_tokens=before)
        with EventLog(folder.events, view) as events, view:
            events.emit("session", pid=os.getpid(), n_committed=len(committer.committed))
            complete = _drive(config, folder, committer, events, console if profile else None)
        if complete:
            committer.finalise()
    return summarise(planned.path)


def _drive(
    config: RunConfig, folder: RunFolder, committer: Committer, events: EventLog, profile_to: Console | None
) -> bool:
    if len(committer.committed) == folder.layout.n_units:
        return True
    try:
        check_model(folder.run["model"], folder.run.get("model_sha256"))
    except ModelChanged as error:
        raise PlanError(str(error)) from error
    # Ray takes seconds to import and start, so it comes only when there is work.
    from harvest.cluster import connected
    from harvest.driver import Driver

    with connected():
        spec = engine_spec(config, folder, profile=profile_to is not None)
        driver = Driver(config=config, spec=spec, committer=committer, events=events)
        try:
            return driver.drive()
        finally:
            if profile_to is not None:
                driver.profile.write(folder.path)
                driver.profile.print(profile_to)


def engine_spec(config: RunConfig, folder: RunFolder, *, profile: bool = False) -> EngineSpec:
    """What the engines of a run are made from; `profile` measures on the device too."""
    generation = config.capture.generation
    sampling: dict[str, Any] = {
        "temperature": generation.temperature,
        "top_p": generation.top_p,
        "top_k": generation.top_k,
        "min_tokens": generation.min_tokens,
        "ignore_eos": generation.ignore_eos,
        "stop": list(generation.stop),
        "seed": generation.seed,
    }
    if generation.logprobs:
        sampling["logprobs"] = 0  # the sampled token's alone
    return EngineSpec(
        run_path=str(folder.path.resolve()),
        model=folder.run["model"],
        locations=tuple(location["name"] for location in folder.run["locations"]),
        layout=folder.layout,
        selection=Selection.from_json(folder.run["selection"]),
        sampling=sampling,
        generates=generation.max_tokens > 1,
        seed=config.seed,
        tensor_parallel_size=config.engine.tensor_parallel_size,
        dtype=config.model.dtype,
        max_model_len=folder.run["max_model_len"],
        trust_remote_code=config.model.trust_remote_code,
        tokenizer=config.model.tokenizer,
        revision=planned_revision(folder.run),
        model_sha256=folder.run.get("model_sha256"),
        lora=(folder.run.get("lora") or {}).get("name"),
        lora_sha256=(folder.run.get("lora") or {}).get("sha256"),
        vllm=config.engine.vllm,
        ring_bytes=config.limits.ring_bytes,
        writer_threads=config.limits.writer_threads,
        prompt_tokens=folder.run["n_prompt_tokens"] / max(1, folder.run["n_invokes"]),
        profile=profile,
    )


def summarise(path: Path | str) -> RunSummary:
    """Totals of a run from its folder alone."""
    folder = RunFolder.open(path)
    state = read_ledger(folder.ledger)
    totals = sum_events(read_events(folder.events))
    units = total_units(folder, state.units, totals.commits).values()
    return RunSummary(
        path=Path(path),
        complete=state.complete is not None,
        n_units=folder.layout.n_units,
        n_committed=len(state.units),
        n_invokes=folder.run["n_invokes"],
        n_skipped=folder.run["n_skipped"],
        n_stored_invokes=sum(unit.n_invokes for unit in units),
        n_tokens=sum(unit.n_tokens for unit in units),
        n_rows=sum(unit.rows for unit in state.units.values()),
        n_locations=len(folder.layout.locations),
        stored_bytes=sum(unit.stored_bytes for unit in units),
        engine_s=totals.engine_s,
        n_engine_losses=totals.n_engine_losses,
        n_failed_attempts=totals.n_failed_attempts,
        suspicious=dict(Counter(location for unit in units for location in unit.suspicious)),
    )


def _refuse_other_content(folder: RunFolder, config: RunConfig) -> None:
    planned, asked = _as_of_now(folder.run["content"], config), config.content()
    differences = list(_differences(planned, asked))
    if differences:
        raise PlanError(
            f"{folder.path} holds a run of another configuration: {'; '.join(differences)}. Choose another store.path, "
            "or go back to the planned values"
        )


def _as_of_now(planned: dict[str, Any], config: RunConfig) -> dict[str, Any]:
    """The content of a plan with the defaults of settings that are younger than it."""
    try:
        raw = {**planned, "store": {**planned["store"], "path": config.store.path}}
        return parse_config(raw).content()
    except (ConfigError, KeyError, TypeError):
        return planned


def _refuse_other_dataset(folder: RunFolder, config: RunConfig) -> None:
    """The plan holds the token ids, so a dataset that is gone does no harm; one that has changed is a mistake."""
    try:
        dataset = open_dataset(config.dataset)
    except DatasetError:
        return
    planned = folder.run["dataset"]
    if file_states(dataset) != planned["files"] and dataset.fingerprint != planned["fingerprint"]:
        raise PlanError(
            f"the dataset {config.dataset.path} is not what {folder.path} was planned with (its bytes have changed): "
            "choose another store.path for the new data, or bring the old data back"
        )


def _refuse_other_adapter(folder: RunFolder, config: RunConfig) -> None:
    adapter = find_adapter(config)
    try:
        if adapter is not None:
            adapter.check(folder.run["lora"]["sha256"])
    except AdapterError as error:
        raise PlanError(str(error)) from error


def _differences(planned: Any, asked: Any, where: str = "") -> list[str]:
    if isinstance(planned, dict) and isinstance(asked, dict):
        found: list[str] = []
        for key in [*planned, *(key for key in asked if key not in planned)]:
            found += _differences(planned.get(key), asked.get(key), f"{where}.{key}" if where else key)
        return found
    return [] if planned == asked else [f"{where} was {planned!r}, is {asked!r}"]


def _say(console: Console | None, line: str) -> None:
    if console is not None:
        console.print(Text(line))
