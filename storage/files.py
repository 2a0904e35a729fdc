"""The few file operations everything durable is built from.

Every change to the file system goes through `os` calls made here or in `shard.py`, so that tests can record them and
replay what a crash may leave behind. New files and folders get the default mode (0o666 and 0o777 before the umask) in
place, never through a private temporary file, so the umask and the set-group bit of the target folder hold.
"""

from __future__ import annotations

import fcntl
import os
import resource
import time
from pathlib import Path
from typing import Any

import xxhash

from storage.errors import writing

Buffer = Any  # anything os.write accepts: bytes, a contiguous numpy array, a memoryview


def digest(data: Buffer) -> str:
    """xxh3-128 of `data`, as 32 hex digits: the digest used for every file that is written whole."""
    return xxhash.xxh3_128_hexdigest(data)


def write_all(fd: int, data: Buffer) -> None:
    """Write all of `data` at the descriptor's own offset."""
    view = memoryview(data).cast("B")
    while view:
        view = view[os.write(fd, view) :]


def pwrite_all(fd: int, data: Buffer, offset: int) -> None:
    """Write all of `data` at `offset`; the kernel may take it in pieces."""
    view = memoryview(data).cast("B")
    while view:
        n = os.pwrite(fd, view, offset)
        view = view[n:]
        offset += n


def pread_into(fd: int, buffer: Buffer, offset: int) -> int:
    """Fill `buffer` from `offset`; return the bytes read, fewer than asked only at the end of the file."""
    view = memoryview(buffer).cast("B")
    total = 0
    while view:
        n = os.preadv(fd, [view], offset)
        if n == 0:
            break
        view = view[n:]
        offset += n
        total += n
    return total


def make_folder(path: Path) -> None:
    """Make `path` and what is missing above it."""
    with writing(path, "making the folder"):
        path.mkdir(parents=True, exist_ok=True)


def write_file(path: Path, data: Buffer, *, sync: bool = True) -> None:
    """Write a whole file that does not matter until something else names it; replace what is there."""
    with writing(path, "writing"):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            write_all(fd, data)
            if sync:
                os.fsync(fd)
        finally:
            os.close(fd)


def replace_file(path: Path, data: Buffer) -> None:
    """Write a whole file so that a reader sees the old one or the new one, also after a crash."""
    partial = path.with_name(path.name + ".partial")
    write_file(partial, data)
    rename(partial, path)
    sync_folder(path.parent)


def rename(source: Path, target: Path) -> None:
    """Rename over `target`; durable only after `sync_folder(target.parent)`."""
    with writing(target, "publishing"):
        os.rename(source, target)


def sync_folder(path: Path) -> None:
    """Make the names inside `path` durable."""
    with writing(path, "syncing the folder"):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def remove_tree(path: Path) -> None:
    """Delete `path` and what is in it, if it is there."""
    if path.is_symlink() or path.is_file():
        with writing(path, "deleting"):
            os.unlink(path)
        return
    if not path.exists():
        return
    for child in sorted(path.iterdir()):
        remove_tree(child)
    with writing(path, "deleting"):
        os.rmdir(path)


def allow_open_files(n_files: int) -> None:
    """Raise this process's soft limit of open files, within its hard one, so that `n_files` more fit comfortably.

    The soft limit of 1,024 is for programs that use `select`; a unit of many locations and shards has as many files.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1024 + 8 * n_files  # several units are in flight, and others open files too
    if soft != resource.RLIM_INFINITY and soft < wanted:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit), hard))


_held_locks: set[int] = set()


def lock_file(path: Path, *, wait_s: float = 0.0) -> int | None:
    """Take an exclusive lock on `path`; return its descriptor, or None where another process holds it for `wait_s`.

    The kernel drops the lock when the process ends, however it ends; `unlock_file` drops it before. A forked child does
    not share it: a child that outlives a killed driver must not keep the next one out.
    """
    with writing(path, "locking"):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        deadline = time.monotonic() + wait_s
        try:
            while not _flock(fd):
                if time.monotonic() >= deadline:
                    os.close(fd)
                    return None
                time.sleep(0.02)
        except BaseException:
            os.close(fd)
            raise
    _held_locks.add(fd)
    return fd


def _flock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock_file(fd: int) -> None:
    """Drop a lock of `lock_file`; harmless in a forked child, which never had it."""
    if fd in _held_locks:
        _held_locks.discard(fd)
        os.close(fd)


def _forget_locks() -> None:
    # Closing the child's copy leaves the parent's lock alone.
    for fd in list(_held_locks):
        unlock_file(fd)


os.register_at_fork(after_in_child=_forget_locks)
