"""The wheel as a user gets it: three packages, ours alone, and the entry points."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
UV = Path(sys.executable).with_name("uv")

_PROBE = """
import importlib.metadata as metadata, importlib.util, json
names = ("harvest", "actors", "storage")
print(json.dumps({
    "owners": {name: metadata.packages_distributions().get(name) for name in names},
    "origins": {name: importlib.util.find_spec(name).origin for name in names},
    "scripts": {e.name: e.value for e in metadata.entry_points(group="console_scripts")},
    "zarr": {e.name: e.value for e in metadata.entry_points(group="zarr.data_type")},
    "version": metadata.version("harvest-activations"),
}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    built = subprocess.run(
        [UV, "build", "--wheel", "--quiet", "--out-dir", out, ROOT], capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """An empty environment outside the repository with the wheel alone, and what it sees there."""
    place = tmp_path_factory.mktemp("user")
    venv.create(place / "venv", with_pip=False, symlinks=True)
    python = place / "venv" / "bin" / "python"
    subprocess.run([UV, "pip", "install", "--quiet", "--no-deps", "--python", python, wheel], check=True, timeout=300)
    done = subprocess.run(
        [python, "-I", "-c", _PROBE], cwd=place, capture_output=True, text=True, check=True, timeout=120
    )
    return place / "venv", json.loads(done.stdout)


def test_wheel_holds_the_three_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"harvest", "actors", "storage"}
    assert {"harvest/py.typed", "actors/py.typed", "storage/py.typed"} <= set(names)
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    sources = {
        str(path.relative_to(ROOT))
        for package in ("harvest", "actors", "storage")
        for path in (ROOT / package).rglob("*.py")
    }
    assert sources <= set(names)
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]


def test_our_packages_belong_to_our_distribution_alone(installed: tuple[Path, dict[str, Any]]) -> None:
    environment, seen = installed
    assert seen["owners"] == {name: ["harvest-activations"] for name in ("harvest", "actors", "storage")}
    for origin in seen["origins"].values():
        assert Path(origin).is_relative_to(environment.resolve()) or Path(origin).is_relative_to(environment)


def test_entry_points(installed: tuple[Path, dict[str, Any]]) -> None:
    environment, seen = installed
    assert seen["scripts"]["harvest"] == "harvest.cli:main"
    assert seen["zarr"] == {"bfloat16": "storage.bfloat16:BFloat16"}
    assert seen["version"] == "0.1.0"
    assert (environment / "bin" / "harvest").is_file()


def test_this_environment_takes_our_packages_from_this_repository() -> None:
    """An editable install has no list of packages, so only another distribution's claim would show here."""
    done = subprocess.run(
        [sys.executable, "-c", _PROBE], cwd=ROOT.parent, capture_output=True, text=True, check=True, timeout=120
    )
    seen = json.loads(done.stdout)
    assert {owner for found in seen["owners"].values() for owner in found or []} <= {"harvest-activations"}
    assert seen["origins"] == {name: str(ROOT / name / "__init__.py") for name in ("harvest", "actors", "storage")}
