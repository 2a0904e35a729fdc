"""Locations of a model for a process that must not import vLLM: the question goes to a subprocess, each time anew.

The subprocess builds vLLM's module tree without weights and without a GPU, so a plan can be made anywhere that vLLM is
installed, before an engine starts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from actors.location_errors import LocationError, UnknownLocation, UnreadableLocation

_ERRORS: dict[str, type[LocationError]] = {
    error.__name__: error for error in (LocationError, UnknownLocation, UnreadableLocation)
}
_LAST_LINES = 15


class ProbeError(RuntimeError):
    """The subprocess failed: vLLM cannot build the model's tree. The message ends with what vLLM said."""


def probe_locations(
    model: str, names: Sequence[str], engine_args: Mapping[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Resolve names on a model's weightless tree; patterns and ranges come back spelled out.

    Args:
        model: a local folder or a Hugging Face id; only `config.json` is read.
        names: aliases, module paths with a side, patterns and ranges.
        engine_args: vLLM's own engine arguments; `tensor_parallel_size` chooses the layouts.

    Returns:
        A dict for each location with the fields of `actors.worker.locations.Location`.

    Raises:
        UnknownLocation, UnreadableLocation: as `resolve_locations`.
        ProbeError: vLLM cannot build the model.
    """
    if not names:
        return []
    locations: list[dict[str, Any]] = _ask(model, names, engine_args)["locations"]
    return locations


def describe_model(model: str, engine_args: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """Rows of a table of all modules: `module`, `class`, `locations` (sides with widths, or why none), `aliases`.

    Raises:
        ProbeError: vLLM cannot build the model.
    """
    rows = _ask(model, (), engine_args)["modules"]
    return [
        {
            "module": row["module"],
            "class": row["class"],
            "locations": ", ".join(f"{side['side']} {side['width']}" for side in row["sides"]) or row["note"],
            "aliases": ", ".join(row["aliases"]),
        }
        for row in rows
    ]


def _ask(model: str, names: Sequence[str], engine_args: Mapping[str, Any] | None) -> dict[str, Any]:
    arguments = dict(engine_args or {})
    tp_size = int(arguments.get("tensor_parallel_size", 1))
    with tempfile.TemporaryDirectory(prefix="harvest-probe-") as folder:
        result = Path(folder) / "answer.json"
        command = [sys.executable, "-m", "actors.worker.locations", "--engine-args", json.dumps(arguments)]
        command += ["--tp-size", str(tp_size), "--result", str(result), "--", model, *names]
        environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "PYTHONPATH": _python_path()}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if not result.exists():
            said = "\n".join((done.stderr or done.stdout).strip().splitlines()[-_LAST_LINES:])
            raise ProbeError(f"vLLM cannot build the module tree of {model} (exit status {done.returncode}):\n{said}")
        answer: dict[str, Any] = json.loads(result.read_text())
    if "error" in answer:
        raise _ERRORS[answer["error"]](answer["message"])
    return answer


def _python_path() -> str:
    """The subprocess finds the packages where this process found them."""
    here = str(Path(__file__).resolve().parent.parent)
    return os.pathsep.join(path for path in (here, os.environ.get("PYTHONPATH", "")) if path)
