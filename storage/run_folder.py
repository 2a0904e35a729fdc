"""The folder of a run: where things lie, how it comes into being, how it is opened.

    RUN/  run.json  config.toml  provenance.json  plan/  ledger.jsonl  receipts.jsonl  events.jsonl  .staging/
    data.zarr/

`run.json` is written last and in one rename: a folder without it is no run yet. It holds the layout, the digests of all
files that never change afterwards, and a checksum of itself, so any damaged bit among them can be named. A folder that
creation left half made carries the marker `.creating` and is made anew by the same call.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from storage.errors import DamagedError, FormatError, RunFolderError, writing
from storage.files import (
    digest,
    make_folder,
    remove_tree,
    rename,
    sync_folder,
    write_file,
)
from storage.format import FORMAT_VERSION, StoreLayout, json_document
from storage.plan_files import PlanFiles, PlanReader, PlanSource, write_plan

_MARKER = ".creating"
_CHECKSUM = re.compile(rb'"checksum": "([0-9a-f]{32})"')
_CREATED = ("data.zarr", "plan", "config.toml", "provenance.json", "run.json.partial", "ledger.jsonl", ".staging")


def staging_folder(run: Path, unit: int, attempt: int) -> Path:
    """Where attempt `attempt` at `unit` writes."""
    return run / ".staging" / f"{unit}-{attempt}"


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """An existing run: its path, layout, the caller's own `run` values, and digests of what never changes."""

    path: Path
    layout: StoreLayout
    run: dict[str, Any]
    files: dict[str, tuple[int, str]]

    @classmethod
    def create(
        cls,
        path: Path | str,
        *,
        layout: StoreLayout,
        plan: PlanSource | PlanFiles,
        run: dict[str, Any],
        config_toml: str,
        provenance: dict[str, Any],
    ) -> RunFolder:
        """Make a run at `path`, which must be absent, empty, or left half made by an earlier call.

        `plan` is written into the run (a `PlanFiles` written elsewhere is copied). Its units must match
        `layout.n_units`. An empty `layout.plan_hash` is filled with the hash of the plan's files. `run` and
        `provenance` are plain JSON values. Raises `RunFolderError` for a folder in use, `WriteError` when the disk
        refuses.
        """
        path = Path(path)
        _prepare(path)
        if isinstance(plan, PlanFiles):
            make_folder(path / "plan")
            for name in plan.files:
                write_file(path / "plan" / name, (plan.folder / name).read_bytes())
            sync_folder(path / "plan")
        else:
            plan = write_plan(path / "plan", plan.units, plan.skipped)
        if plan.n_units != layout.n_units:
            raise RunFolderError(f"The layout has {layout.n_units} units, but the plan has {plan.n_units}.")
        if not layout.plan_hash:
            layout = StoreLayout.from_json({**layout.to_json(), "plan_hash": plan.hash})
        contents: dict[str, bytes] = {
            "config.toml": config_toml.encode(),
            "provenance.json": json_document(provenance),
        } | {f"data.zarr/{name}": document for name, document in layout.documents().items()}
        for name, content in contents.items():
            make_folder((path / name).parent)
            write_file(path / name, content)
        write_file(path / "ledger.jsonl", b"")
        make_folder(path / ".staging")
        for folder in sorted({(path / name).parent for name in contents}, reverse=True):
            sync_folder(folder)
        files = {f"plan/{name}": value for name, value in plan.files.items()}
        files |= {name: (len(content), digest(content)) for name, content in contents.items()}
        write_file(path / "run.json.partial", _run_document(layout, run, files))
        rename(path / "run.json.partial", path / "run.json")
        sync_folder(path)  # before the marker goes: a folder with neither would belong to nobody
        sync_folder(path.absolute().parent)
        remove_tree(path / _MARKER)
        return cls(path=path, layout=layout, run=run, files=files)

    @classmethod
    def open(cls, path: Path | str) -> RunFolder:
        """The run at `path`. `RunFolderError` where there is none, `FormatError` for a version that this code does not
        read, `DamagedError` where `run.json` is not what was written.
        """
        path = Path(path)
        try:
            raw = (path / "run.json").read_bytes()
        except FileNotFoundError:
            raise RunFolderError(_why_no_run(path)) from None
        except OSError as error:
            raise RunFolderError(f"{path / 'run.json'} cannot be read: {error.strerror}.") from error
        content = _checked_run_document(path / "run.json", raw)
        return cls(
            path=path,
            layout=StoreLayout.from_json(content["layout"]),
            run=content["run"],
            files={name: (size, value) for name, (size, value) in content["files"].items()},
        )

    @classmethod
    def exists(cls, path: Path | str) -> bool:
        """Whether `path` is a completely made run."""
        return (Path(path) / "run.json").is_file()

    @property
    def data(self) -> Path:
        """The Zarr group."""
        return self.path / "data.zarr"

    @property
    def ledger(self) -> Path:
        """The ledger."""
        return self.path / "ledger.jsonl"

    @property
    def receipts(self) -> Path:
        """Receipts of committed units, one a line, found through the ledger."""
        return self.path / "receipts.jsonl"

    @property
    def events(self) -> Path:
        """The event stream."""
        return self.path / "events.jsonl"

    @property
    def statistics(self) -> Path:
        """Statistics by location of a finished run."""
        return self.path / "statistics.json"

    @property
    def staging(self) -> Path:
        """Folders of attempts that are not published."""
        return self.path / ".staging"

    @property
    def lock(self) -> Path:
        """The file that the driver locks."""
        return self.path / ".lock"

    @cached_property
    def plan(self) -> PlanReader:
        """The plan."""
        return PlanReader(self.path / "plan")

    def config_toml(self) -> str:
        """The resolved config, as written at creation."""
        return (self.path / "config.toml").read_text()

    def provenance(self) -> dict[str, Any]:
        """What made the run, as written at creation."""
        return dict(json.loads((self.path / "provenance.json").read_bytes()))


def check_place(path: Path | str) -> None:
    """Whether a run can be made at `path`, which may be absent; changes nothing. `RunFolderError` says why not."""
    path = Path(path)
    if path.exists() and not path.is_dir():
        raise RunFolderError(f"{path} is a file; choose another place for the run.")
    present = {child.name for child in path.iterdir()} if path.exists() else set()
    if "run.json" in present:
        raise RunFolderError(f"{path} holds a run already; open it, or choose another place.")
    if present and _MARKER not in present:
        some = ", ".join(sorted(present)[:3])
        raise RunFolderError(f"{path} is not empty and not a run (it holds {some}); choose another place.")
    parent = path.absolute()
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise RunFolderError(f"{parent} cannot be written, so {path} cannot be made; choose another place for the run.")


def _prepare(path: Path) -> None:
    """Bring `path` to the state in which creation begins: there, empty but for the marker."""
    check_place(path)
    make_folder(path)
    write_file(
        path / _MARKER, b"This run is being made. Without run.json beside it, giving the command again remakes it.\n"
    )
    sync_folder(path)
    for name in _CREATED:
        remove_tree(path / name)


def _run_document(layout: StoreLayout, run: dict[str, Any], files: dict[str, tuple[int, str]]) -> bytes:
    content = {
        "format": "harvest",
        "format_version": FORMAT_VERSION,
        "run": run,
        "layout": layout.to_json(),
        "files": {name: list(value) for name, value in sorted(files.items())},
        "checksum": "0" * 32,
    }
    return _with_checksum(json_document(content))


def _with_checksum(raw: bytes) -> bytes:
    """Fill in the checksum: xxh3-128 of the document with zeros in its place."""
    at = raw.rindex(b'"checksum": "') + len(b'"checksum": "')
    return raw[:at] + digest(raw).encode() + raw[at + 32 :]


def _checked_run_document(path: Path, raw: bytes) -> dict[str, Any]:
    damaged = DamagedError(f"{path} is damaged: its checksum does not match. Restore it from a copy; rows are intact.")
    try:
        content = json.loads(raw)
    except ValueError:
        raise damaged from None
    if not isinstance(content, dict) or content.get("format") != "harvest":
        if b'"format_version"' in raw and b'"checksum"' in raw:
            raise damaged
        raise FormatError(f"{path} does not describe a Harvest run.")
    found = list(_CHECKSUM.finditer(raw))
    if not found:
        raise damaged
    start, end = found[-1].span(1)
    if digest(raw[:start] + b"0" * 32 + raw[end:]).encode() != raw[start:end]:
        raise damaged
    version = content.get("format_version")
    if version != FORMAT_VERSION:
        raise FormatError(
            f"{path.parent} has format version {version}; this version of Harvest reads {FORMAT_VERSION}. Use the "
            "version that wrote it, or a newer one."
        )
    return content


def _why_no_run(path: Path) -> str:
    if not path.exists():
        return f"There is no run at {path}: the folder does not exist."
    if (path / _MARKER).exists():
        return f"The run at {path} was not completely made. Give the command that made it again."
    if (path / "zarr.json").exists() and (path.parent / "run.json").exists():
        return f"{path} is the store inside a run; open {path.parent}."
    if (path / "zarr.json").exists():
        return f"{path} is a Zarr store that Harvest did not make: it lies in no run folder."
    if (path / "ledger.jsonl").exists() or (path / "data.zarr").exists():
        return f"The run at {path} has lost its run.json. Restore that file from a copy; the rows may be intact."
    return f"{path} is not a run: it has no run.json."


def free_bytes(path: Path) -> int:
    """Bytes that the file system of `path` (or of its nearest existing parent) has free for this user."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    with writing(path, "looking at the free space of"):
        return shutil.disk_usage(path).free
