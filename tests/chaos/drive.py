"""A driver over scripted engines, as a program of its own: `python -m tests.chaos.drive RUN`. Resumes what is there."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from actors.protocol import EngineSpec
from actors.selection import Selection
from harvest.cluster import connected
from harvest.config import RunConfig, parse_config
from harvest.driver import Driver
from harvest.events import EventLog
from storage.commit import Committer
from storage.run_folder import RunFolder
from tests.harness import make_run

WIDTH = 64
LOCATIONS = [
    SimpleNamespace(name=f"residual.{i}", array=f"residual.{i}", path=f"{i}", alias=None, width=WIDTH) for i in range(2)
]


def make_scripted_run(path: Path, *, n_prompts: int = 400, n_units: int = 40, seed: int = 0) -> RunFolder:
    """A planned run whose rows the scripted engine makes."""
    random = np.random.default_rng(seed)
    prompts = [random.integers(0, 1000, int(n)).tolist() for n in random.integers(1, 60, n_prompts)]
    return make_run(path, prompts, LOCATIONS, n_units=n_units, rows_per_shard=1024, unit_rows=60 * n_prompts // n_units)


def make_config(run: RunFolder, *, engines: int = 2, **limits: int) -> RunConfig:
    """Settings of speed; the content is the run's."""
    return parse_config(
        {
            "model": {"name": "scripted"},
            "dataset": {"path": "scripted"},
            "capture": {"locations": [x.name for x in LOCATIONS]},
            "store": {"path": str(run.path)},
            "engine": {"count": engines, "cpus": 0},
            "limits": limits,
        }
    )


def make_spec(run: RunFolder, **script: object) -> EngineSpec:
    """What the scripted engines are made from."""
    return EngineSpec(
        run_path=str(run.path.resolve()),
        model="",
        locations=tuple(x.name for x in LOCATIONS),
        layout=run.layout,
        selection=Selection(),
        sampling={},
        writer_threads=2,
        fake={"step_s": 0.02, **script},
    )


def drive(run: RunFolder, config: RunConfig, spec: EngineSpec) -> bool:
    """Run to the end and finalise."""
    with Committer.open(run) as committer:
        with EventLog(run.events) as events:
            complete = Driver(config=config, spec=spec, committer=committer, events=events).drive()
        if complete:
            committer.finalise()
        return complete


if __name__ == "__main__":
    resumed = RunFolder.open(Path(sys.argv[1]))
    with connected():
        drive(resumed, make_config(resumed, attempts=1000, engine_restarts=1000), make_spec(resumed))
