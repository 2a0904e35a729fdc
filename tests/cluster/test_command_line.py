"""The command line from end to end: real Ray, real vLLM, real store, each command as a user gives it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.whole_runs import harvest, write_config

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def finished(tiny_qwen3, demo_text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    config = write_config(folder, tiny_qwen3, demo_text)
    planned = harvest("plan", config)
    assert "240 planned" in planned.stdout
    first = harvest("run", config)
    assert "complete" in first.stdout
    return config, folder / "run"


def test_a_finished_run_says_so_without_an_engine(finished):
    config, run = finished
    events = (run / "events.jsonl").read_text()
    again = harvest("run", config)
    assert "complete already" in again.stdout
    assert (run / "events.jsonl").read_text() == events


def test_the_commands_of_the_readme(finished, tmp_path):
    config, run = finished
    shown = {}
    for line in readme_block("sh", "harvest plan run.toml"):
        command = line.partition("#")[0].replace("run.toml", str(config)).replace("out/run", str(run)).split()
        assert command[0] == "harvest"
        extra = ["--json", str(tmp_path / "report.json")] if command[1] == "verify" else []
        shown[command[1]] = harvest(*command[1:], *extra).stdout
    assert list(shown) == ["plan", "run", "status", "verify", "inspect"]
    assert "240 planned" in shown["plan"]
    assert "complete" in shown["status"]
    assert "acts/mlp_out.2" in shown["inspect"]
    assert "norm p99" in shown["inspect"]
    # The values, recomputed by another implementation.
    assert "parity ok" in shown["verify"]
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["passed"]
    assert len(report["parity"]["invokes"]) == 16
    assert [entry["location"] for entry in report["parity"]["locations"]] == ["residual.1", "residual.3", "mlp_out.2"]
    assert all(0 < entry["relative_error"] < 4e-3 for entry in report["parity"]["locations"])
    assert "position" in harvest("inspect", run, "--invoke", "5").stdout


def test_the_reading_snippet_of_the_readme(finished, demo_text):
    _, run = finished
    lines = readme_block("python", "import json, zarr")
    assert len(lines) <= 10
    code = "\n".join(lines).replace("out/demo", str(run)).replace("residual.10", "residual.1")
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    text = json.loads(demo_text.read_text().splitlines()[7])["text"]
    assert done.stdout.startswith("(")
    assert text[:40] in done.stdout


def test_the_training_snippet_of_the_readme(finished):
    _, run = finished
    code = "\n".join(readme_block("python", "import harvest, torch"))
    code = code.replace("out/demo", str(run)).replace("residual.10", "residual.1")
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    steps = [line.split() for line in done.stdout.splitlines()]
    assert [int(step) for step, _ in steps] == list(range(len(steps)))
    assert len(steps) > 10
    assert all(float(norm) > 0 for _, norm in steps)


def readme_block(language: str, beginning: str) -> list[str]:
    """Lines of the README's code block that begins so."""
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    blocks = [block.partition("```")[0] for block in readme.split(f"```{language}\n")[1:]]
    return [line for line in next(b for b in blocks if b.startswith(beginning)).splitlines() if line.strip()]


def test_verify_finds_rows_of_another_layer_and_a_flipped_bit(finished, tmp_path):
    import shutil

    _, run = finished
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    shard = next(path for path in (copy / "data.zarr/acts/residual.1").iterdir() if path.name.startswith("c."))
    raw = bytearray(shard.read_bytes())
    raw[1000] ^= 4
    shard.write_bytes(raw)
    done = harvest("verify", copy, check=False)
    assert done.returncode == 1
    assert "acts/residual.1" in done.stdout


def test_another_configuration_is_refused_with_the_difference(finished):
    config, _ = finished
    done = harvest("run", config, "--set", "store.dtype=float32", "--set", "seed=4", check=False)
    assert done.returncode == 1
    assert "store.dtype was 'bfloat16', is 'float32'" in done.stderr
    assert "seed was 3, is 4" in done.stderr


def test_a_killed_driver_leaves_no_process_and_the_same_command_finishes(tiny_qwen3, demo_text, finished, tmp_path):
    config = write_config(
        tmp_path, tiny_qwen3, demo_text, {"engine.vllm": {"max_num_seqs": 1, "max_num_batched_tokens": 256}}
    )
    run = tmp_path / "run"
    ledger = run / "ledger.jsonl"
    mark = f"HARVEST_TEST_MARK={tmp_path}"
    driver = subprocess.Popen(
        [sys.executable, "-m", "harvest.cli", "run", str(config)],
        env={**os.environ, "HARVEST_TEST_MARK": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 240
    while not (ledger.exists() and ledger.read_text().count('"unit"') >= 2):
        assert driver.poll() is None, "the run ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.02)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    before = ledger.read_text()
    committed = before.count('"unit"')
    assert committed < json.loads((run / "run.json").read_text())["layout"]["n_units"]
    while left := [process for process in psutil.process_iter() if _has_mark(process, mark)]:
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.2)

    done = harvest("run", config)
    assert f"resuming: {committed} of" in done.stdout.replace("\n", " ")
    after = ledger.read_text()
    assert after.startswith(before)
    units = [json.loads(line)["unit"] for line in after.splitlines() if '"unit"' in line]
    assert sorted(units) == list(range(len(units)))
    assert harvest("verify", run).returncode == 0
    _assert_equal_runs(run, finished[1])


def _has_mark(process: psutil.Process, mark: str) -> bool:
    try:
        return f"{process.environ().get('HARVEST_TEST_MARK')}" == mark.partition("=")[2]
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def _assert_equal_runs(run: Path, reference: Path) -> None:
    """Placement and labels exactly, values to the stored precision."""
    import zarr

    ours, other = zarr.open(run / "data.zarr", mode="r"), zarr.open(reference / "data.zarr", mode="r")
    for name in ("tokens/id", "tokens/position", "tokens/invoke", "index/row_start", "index/n_rows", "index/unit"):
        np.testing.assert_array_equal(ours[name][:], other[name][:])
    for name in ("residual.1", "residual.3", "mlp_out.2"):
        a, b = (store[f"acts/{name}"][:].astype(np.float32) for store in (ours, other))
        assert np.linalg.norm(a - b) / np.linalg.norm(b) < 1e-3
