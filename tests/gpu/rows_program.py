"""Harvests some prompts with one engine in a process of its own: `python -m tests.gpu.rows_program SETTINGS OUT`.

SETTINGS is a JSON file with the fields of `Settings`; OUT gets rows, token ids and positions by invoke, pickled.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One harvest."""

    model: str
    prompts: list[list[int]]
    locations: list[str]
    max_tokens: int = 1
    n_units: int = 2
    selection: dict[str, Any] = field(default_factory=dict)
    hostile: bool = False
    """Overwrite the static buffers and freed device memory with NaN after every step."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Changed fields of EngineSpec."""
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Harvested:
    """What the store holds afterwards."""

    rows: list[dict[str, Any]]
    """Of each invoke: location -> [rows, width] float32."""
    token_ids: list[list[int]]
    positions: list[list[int]]
    n_recomputed: int
    n_layers_run: int


def harvest_in_process(settings: Settings, folder: Path) -> Harvested:
    """Run the program."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "settings.json").write_text(json.dumps(asdict(settings)))
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    subprocess.run(
        [sys.executable, "-m", "tests.gpu.rows_program", str(folder / "settings.json"), str(folder / "out.pkl")],
        cwd=ROOT,
        check=True,
        timeout=400,
        # The suite's setting for CPUs would win over kv_cache_memory_bytes.
        env={name: value for name, value in environment.items() if name != "VLLM_CPU_KVCACHE_SPACE"}
        | settings.environment,
    )
    found: Harvested = pickle.loads((folder / "out.pkl").read_bytes())
    return found


def _be_hostile(worker: Any) -> None:
    import torch

    harvester = worker.harvester
    end_step = harvester.end_step

    def end_step_then_overwrite() -> None:
        end_step()
        for tap in harvester._taps._taps:
            tap.buffer_PD.fill_(float("nan"))
        # The allocator hands freed memory out again: whoever still reads it there reads NaN.
        for n_values in (1 << 10, 1 << 14, 1 << 18, 1 << 22):
            torch.full((n_values,), float("nan"), device=harvester._device)

    harvester.end_step = end_step_then_overwrite


def main() -> None:
    """Harvest and write."""
    from actors.selection import Selection
    from actors.worker.locations import resolve_locations
    from actors.worker.tree import build_model_tree
    from tests import harness

    settings = Settings(**json.loads(Path(sys.argv[1]).read_text()))
    locations = resolve_locations(build_model_tree(settings.model), settings.locations)
    selection = Selection(**settings.selection)
    with tempfile.TemporaryDirectory() as folder:
        run = harness.make_run(
            Path(folder) / "run",
            settings.prompts,
            locations,
            n_units=settings.n_units,
            selection=selection,
            max_tokens=settings.max_tokens,
        )
        arguments = dict(settings.engine)
        vllm = {
            "kv_cache_memory_bytes": 1 << 28,
            "gpu_memory_utilization": 0.05,
            # Few sizes: the tests pay for every capture.
            "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128]},
            **arguments.pop("vllm", {}),
        }
        if vllm.get("enforce_eager"):
            del vllm["compilation_config"]
        with harness.engine(
            run, Path(settings.model), locations, selection=selection, vllm=vllm, **arguments
        ) as feeder:
            if settings.hostile:
                feeder._llm.call(_be_hostile)  # type: ignore[arg-type]
            reader = harness.harvest(run, feeder)
            stats = feeder.stats
        invokes = [reader.prompt(invoke) for invoke in range(len(settings.prompts))]
        found = Harvested(
            rows=[{name: rows.astype("float32") for name, rows in invoke.rows.items()} for invoke in invokes],
            token_ids=[invoke.token_ids.tolist() for invoke in invokes],
            positions=[invoke.positions.tolist() for invoke in invokes],
            n_recomputed=stats.n_recomputed,
            n_layers_run=stats.n_layers_run,
        )
    Path(sys.argv[2]).write_bytes(pickle.dumps(found))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    # The result is pickled: its class must have a name that another process can import.
    from tests.gpu.rows_program import main as run_main

    run_main()
