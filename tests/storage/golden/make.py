"""Makes the golden runs of the current format version: `python -m tests.storage.golden.make`.

Run it once a version, never again: later versions must read what is committed here.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np

from storage.format import FORMAT_VERSION, Compression
from storage.reader import StoreReader
from storage.testing import ScriptedRun

HERE = Path(__file__).parent
KINDS: dict[str, Compression | None] = {"plain": None, "zstd": "zstd"}


def golden_script(kind: str) -> ScriptedRun:
    """The script of a golden run."""
    return ScriptedRun(seed=1, n_units=2, rows_per_shard=64, shards_per_unit=2, compression=KINDS[kind])


def main() -> None:
    """Write `v<version>-<kind>/` and the values it must show, `v<version>-<kind>.npz`, as plain bits."""
    for kind in KINDS:
        path = HERE / f"v{FORMAT_VERSION}-{kind}"
        shutil.rmtree(path, ignore_errors=True)
        script = golden_script(kind)
        run = script.create(path)
        script.finish(run)
        (path / ".lock").unlink()
        reader = StoreReader(path)
        values: dict[str, Any] = {
            array.replace("/", "|"): reader.array(array, slice(None)).view(np.uint8) for array in run.layout.arrays
        }
        np.savez_compressed(path.with_suffix(".npz"), allow_pickle=False, **values)


if __name__ == "__main__":
    main()
