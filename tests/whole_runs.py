"""A whole run as a user gives it: a TOML file, and the `harvest` command in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

# The tests' own setting, which hides the machine's devices from actors that ask for none.
_NOT_THE_USERS = "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"


def write_config(folder: Path, model: Path, data: Path, changes: Mapping[str, Any] | None = None) -> Path:
    """`folder/run.toml`: a small run of JSON lines at three locations of a tiny model into `folder/run`.

    Args:
        folder: takes the file and the run.
        model: folder of the model.
        data: JSON lines with `id` and `text`.
        changes: values by dotted key, over what this function chooses; one that is a dict replaces a section.
    """
    values: dict[str, Any] = {
        "seed": 3,
        "model.name": str(model),
        "dataset.path": str(data),
        "dataset.id_column": "id",
        "tokenization.processes": 1,
        "capture.locations": ["residual.1", "residual.3", "mlp_out.2"],
        "store.path": str(folder / "run"),
        "store.rows_per_shard": 512,
        "engine.vllm": {"max_num_seqs": 16, "max_num_batched_tokens": 256},
        **(changes or {}),
    }
    config: dict[str, Any] = {}
    for key, value in values.items():
        *sections, name = key.split(".")
        table = config
        for section in sections:
            table = table.setdefault(section, {})
        table[name] = value
    path = folder / "run.toml"
    path.write_text(tomli_w.dumps(config))
    return path


def harvest(*arguments: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Give a command to its end; unless `check` is False it must succeed."""
    done = subprocess.run(
        [sys.executable, "-m", "harvest.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=400,
        env={name: value for name, value in os.environ.items() if name != _NOT_THE_USERS},
    )
    if check:
        assert done.returncode == 0, done.stdout + done.stderr
    return done
