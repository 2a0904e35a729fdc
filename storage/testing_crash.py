"""Records file operations and replays what POSIX lets a crash leave behind.

POSIX promises little: data reaches the disk at `fsync` of the file, names at `fsync` of their folder. Until then each
write may be lost, kept, or kept in part, and each change of a name may be lost or kept, whatever the order in which
they were made. `Recorder` notes the calls of `os` that change files below a folder; `crash_states` builds, for any
moment, states of the disk that these rules allow.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock


@dataclass(frozen=True, slots=True)
class Operation:
    """One recorded call. `inode` numbers files by creation; `path` and `other` are relative to the folder."""

    kind: str
    path: str = ""
    other: str = ""
    inode: int = 0
    offset: int = 0
    data: bytes = b""


@dataclass
class Recorder:
    """The operations below `root`, in order."""

    root: Path
    operations: list[Operation] = field(default_factory=list)
    _inodes: dict[str, int] = field(default_factory=dict)
    _open: dict[int, tuple[int, str]] = field(default_factory=dict)
    _next: int = 1

    def _name(self, path: Any) -> str | None:
        full = os.path.abspath(os.fspath(path))
        root = os.path.abspath(self.root)
        if full == root:
            return ""
        return os.path.relpath(full, root) if full.startswith(root + "/") else None

    @contextmanager
    def recording(self) -> Iterator[Recorder]:
        """Note what the process does below `root` while the body runs."""
        real = {name: getattr(os, name) for name in _RECORDED}
        with mock.patch.multiple(os, **{name: _recorded(self, name, real) for name in _RECORDED}):
            yield self


_RECORDED = ("open", "close", "write", "pwrite", "ftruncate", "fsync", "rename", "mkdir", "unlink", "rmdir")


def _recorded(recorder: Recorder, name: str, real: dict[str, Any]) -> Any:
    """The recording twin of `os.<name>`."""
    operations = recorder.operations

    def note_open(path: Any, flags: int, mode: int = 0o777, **rest: Any) -> int:
        relative = recorder._name(path)
        existed = os.path.exists(path)
        fd: int = real["open"](path, flags, mode, **rest)
        if relative is None:
            return fd
        if os.path.isdir(path):
            recorder._open[fd] = (0, relative)
            return fd
        if not existed:
            recorder._inodes[relative] = recorder._next
            operations.append(Operation("create", relative, inode=recorder._next))
            recorder._next += 1
        inode = recorder._inodes[relative]
        if existed and flags & os.O_TRUNC:
            operations.append(Operation("truncate", inode=inode, offset=0))
        recorder._open[fd] = (inode, relative)
        return fd

    def note_close(fd: int) -> None:
        recorder._open.pop(fd, None)
        real["close"](fd)

    def note_write(fd: int, data: Any) -> int:
        offset = os.lseek(fd, 0, os.SEEK_CUR) if fd in recorder._open else 0
        n: int = real["write"](fd, data)
        if fd in recorder._open:
            operations.append(Operation("write", inode=recorder._open[fd][0], offset=offset, data=bytes(data)[:n]))
        return n

    def note_pwrite(fd: int, data: Any, offset: int) -> int:
        n: int = real["pwrite"](fd, data, offset)
        if fd in recorder._open:
            operations.append(Operation("write", inode=recorder._open[fd][0], offset=offset, data=bytes(data)[:n]))
        return n

    def note_ftruncate(fd: int, length: int) -> None:
        real["ftruncate"](fd, length)
        if fd in recorder._open:
            operations.append(Operation("truncate", inode=recorder._open[fd][0], offset=length))

    def note_fsync(fd: int) -> None:
        real["fsync"](fd)
        inode, relative = recorder._open.get(fd, (None, ""))
        if inode:
            operations.append(Operation("fsync", inode=inode))
        elif inode == 0:
            operations.append(Operation("fsync folder", relative))

    def note_rename(source: Any, target: Any, **rest: Any) -> None:
        real["rename"](source, target, **rest)
        old, new = recorder._name(source), recorder._name(target)
        if old is None or new is None:
            return
        operations.append(Operation("rename", old, new))
        moved = {path: inode for path, inode in recorder._inodes.items() if path == old or path.startswith(old + "/")}
        for path, inode in moved.items():
            del recorder._inodes[path]
            recorder._inodes[new + path.removeprefix(old)] = inode

    def note_mkdir(path: Any, *rest: Any, **more: Any) -> None:
        real["mkdir"](path, *rest, **more)
        relative = recorder._name(path)
        if relative is not None:
            operations.append(Operation("mkdir", relative))

    def note_remove(path: Any, **rest: Any) -> None:
        real[name](path, **rest)
        relative = recorder._name(path)
        if relative is not None:
            recorder._inodes.pop(relative, None)
            operations.append(Operation("remove", relative))

    return {
        "open": note_open,
        "close": note_close,
        "write": note_write,
        "pwrite": note_pwrite,
        "ftruncate": note_ftruncate,
        "fsync": note_fsync,
        "rename": note_rename,
        "mkdir": note_mkdir,
        "unlink": note_remove,
        "rmdir": note_remove,
    }[name]


def crash_state(operations: list[Operation], end: int, target: Path, rng: random.Random) -> None:
    """Build in `target` a state that a crash right after `operations[:end]` may leave, drawn by `rng`.

    What was synced is there. Of the rest a random part is, from nothing to all, in an order-breaking way: later changes
    may survive earlier ones. A kept write may be cut short or have its middle lost.
    """
    done = operations[:end]
    keep_share = rng.choice((0.0, 0.3, 0.7, 1.0))
    synced_at: dict[int, int] = {}
    folder_at: dict[str, int] = {}
    for i, operation in enumerate(done):
        if operation.kind == "fsync":
            synced_at[operation.inode] = i
        elif operation.kind == "fsync folder":
            folder_at[operation.path] = i
    content: dict[int, bytearray] = {}
    for i, operation in enumerate(done):
        durable = synced_at.get(operation.inode, -1) > i
        if operation.kind == "create":
            content[operation.inode] = bytearray()
        elif operation.kind == "truncate":
            if durable or rng.random() < keep_share:
                data = content[operation.inode]
                del data[operation.offset :]
                data.extend(bytes(max(0, operation.offset - len(data))))
        elif operation.kind == "write":
            _apply_write(content[operation.inode], operation, 1.0 if durable else keep_share, rng)
    names = _names(done, folder_at, keep_share, rng)
    target.mkdir(parents=True)
    for path, inode in sorted(names.items()):
        place = target / path
        if not place.parent.is_dir():
            continue  # the folder's own name was lost, and all below it
        if inode == 0:
            place.mkdir(exist_ok=True)
        else:
            place.write_bytes(content[inode])


def _apply_write(data: bytearray, operation: Operation, keep: float, rng: random.Random) -> None:
    if keep < 1.0 and rng.random() >= keep:
        if rng.random() < 0.5:  # the size may be durable where the bytes are not
            data.extend(bytes(max(0, operation.offset + len(operation.data) - len(data))))
        return
    written = operation.data
    if keep < 1.0 and len(written) > 1 and rng.random() < 0.4:
        cut = rng.randrange(1, len(written))
        if rng.random() < 0.5:
            written = written[:cut]
        else:
            written = bytes(cut) + written[cut:]
    data.extend(bytes(max(0, operation.offset - len(data))))
    data[operation.offset : operation.offset + len(written)] = written


def _names(done: list[Operation], folder_at: dict[str, int], keep_share: float, rng: random.Random) -> dict[str, int]:
    """Path to inode (0 for a folder) in one allowed state."""
    names: dict[str, int] = {"": 0}
    truth: dict[str, int] = {"": 0}  # what the process saw, whatever survives

    def kept(path: str, i: int) -> bool:
        return folder_at.get(str(Path(path).parent).removeprefix("."), -1) > i or rng.random() < keep_share

    for i, operation in enumerate(done):
        path = operation.path
        if operation.kind in ("create", "mkdir"):
            truth[path] = operation.inode
            if kept(path, i):
                names[path] = operation.inode
        elif operation.kind == "remove":
            truth.pop(path, None)
            if kept(path, i):
                _drop(names, path)
        elif operation.kind == "rename":
            moved = {
                operation.other + old.removeprefix(path): truth.pop(old)
                for old in list(truth)
                if old == path or old.startswith(path + "/")
            }
            inner = {
                operation.other + old.removeprefix(path): inode
                for old, inode in names.items()
                if old == path or old.startswith(path + "/")
            }
            truth |= moved
            arrived = kept(operation.other, i)
            if kept(path, i):
                _drop(names, path)
            if arrived:
                _drop(names, operation.other)
                # What lies below a renamed folder moves with it, as far as its own names were durable.
                names |= inner | {operation.other: moved[operation.other]}
    return names


def _drop(names: dict[str, int], path: str) -> None:
    for name in [name for name in names if name == path or name.startswith(path + "/")]:
        del names[name]
