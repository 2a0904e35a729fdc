"""A harvest by a compiled engine, in a process of its own: `python -m tests.actors.compiled_program MODEL RUN NAMES`.

`RUN` is made here; the prompts are those of `prompts()`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np


def prompts() -> list[list[int]]:
    """Lengths on both sides of a step's size, some alike."""
    random = np.random.default_rng(9)
    return [random.integers(5, 1000, n).tolist() for n in (1, 7, 64, 64, 129, 300)]


def main(model: Path, path: Path, names: list[str]) -> None:
    from actors.worker.locations import resolve_locations
    from actors.worker.tree import build_model_tree
    from tests.harness import engine, harvest, make_run

    locations = resolve_locations(build_model_tree(str(model)), names)
    run = make_run(path, prompts(), locations)
    vllm = {"enforce_eager": False, "max_num_batched_tokens": 128}
    with engine(run, model, locations, vllm=vllm) as feeder:
        harvest(run, feeder, timeout_s=300)


if __name__ == "__main__":
    import tests.conftest  # noqa: F401, the environment

    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3].split(","))
