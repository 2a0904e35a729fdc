"""RunProfile: where a run's time went, by engine and together; printed by `harvest run --profile`, kept as a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from actors.profile import MAIN_STAGES, EngineProfile

PROFILE_FILE = "profile.json"
_MAIN_WORDS = {
    "start": "start-up",
    "plan": "reading the plan",
    "feed": "adding requests",
    "forward": "forward",
    "snapshot": "snapshot",
    "settle": "ending requests",
    "gated": "gated: the ring was full",
    "sealing": "nothing to compute, sealing",
    "idle": "idle: no lease",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunProfile:
    """One call of `run`."""

    engines: Mapping[str, EngineProfile]
    """By engine; each generation of an engine that died is one of its own."""

    @property
    def total(self) -> EngineProfile:
        """All engines together: engine-seconds."""
        return reduce(add, self.engines.values(), EngineProfile())

    def to_json(self) -> dict[str, Any]:
        """Seconds by engine and together, and the shares of both tables."""
        rows = {**self.engines, "run": self.total}
        return {name: {**profile.to_json(), "shares": shares(profile)} for name, profile in rows.items()}

    def write(self, folder: Path) -> Path:
        """Write `profile.json` into a run folder, over that of an earlier call."""
        path = folder / PROFILE_FILE
        path.write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")
        return path

    def print(self, console: Console) -> None:
        """Two tables: what adds up to 100 %, and what went on beside it."""
        named = dict(self.engines) if len(self.engines) > 1 else {}
        columns = {**named, "run" if named else next(iter(self.engines), "run"): self.total}
        main = Table("engine's thread", *columns, title="Where the time went", title_justify="left")
        for stage in MAIN_STAGES:
            main.add_row(_MAIN_WORDS[stage], *(_cell(each.seconds(stage), each.wall_s) for each in columns.values()))
        main.add_row("together", *(_cell(each.wall_s, each.wall_s) for each in columns.values()))
        console.print(main)
        beside = Table("beside it, of the time served", *columns)
        for stage, words in _beside_words(self.total).items():
            beside.add_row(words, *(_cell(each.seconds(stage), _room_s(each, stage)) for each in columns.values()))
        beside.add_row("tokens of a full step", *(f"{100 * each.fullness:.1f} %" for each in columns.values()))
        console.print(beside)


def shares(profile: EngineProfile) -> dict[str, float]:
    """Each stage's share: main stages of all time (they add up to 1), the others of their threads' time served."""
    found = {}
    for stage in (*MAIN_STAGES, *_beside_words(profile)):
        room_s = profile.wall_s if stage in MAIN_STAGES else _room_s(profile, stage)
        found[stage] = round(profile.seconds(stage) / room_s, 5) if room_s > 0 else 0.0
    return found


def _beside_words(profile: EngineProfile) -> dict[str, str]:
    on_device = {
        "device_forward": "device: passes",
        "device_snapshot": "device: snapshots",
        "copy": "copy stream: device to host",
    }
    return {
        **(on_device if profile.device_forward_s or profile.copy_s else {}),
        "copy_wait": f"{profile.writers} writer threads: waiting for copies",
        "write": f"{profile.writers} writer threads: writing",
        "seal": f"{profile.sealers} sealing threads",
        "commit": "driver: committing",
    }


def _room_s(profile: EngineProfile, stage: str) -> float:
    """The time that a stage could have taken: as many seconds a second as it has threads."""
    threads = {"copy_wait": profile.writers, "write": profile.writers, "seal": profile.sealers}.get(stage, 1)
    return profile.serving_s * threads


def _cell(seconds: float, of_s: float) -> str:
    return f"{100 * seconds / of_s:5.1f} %  {seconds:,.2f} s" if of_s > 0 else f"{seconds:,.2f} s"
