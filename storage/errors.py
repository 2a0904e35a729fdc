"""Every error the store raises, as one tree.

A message says what happened, where, and what to do next. Errors are picklable (they cross process boundaries), so they
carry nothing but their message.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike


class StorageError(Exception):
    """Root of all errors of the store."""


class FormatError(StorageError):
    """The data is not of a format that this version reads: another version, a foreign Zarr group, a bad layout."""


class RunFolderError(StorageError):
    """The folder is not a usable run: absent, foreign, incompletely made, or made for another plan."""


class RunLockedError(StorageError):
    """Another driver holds the run."""


class RowError(StorageError):
    """Rows that are out of range, written twice, missing, or of the wrong shape or dtype."""


class ReceiptError(StorageError):
    """A receipt does not describe the unit it claims to describe."""


class WriteError(StorageError):
    """The operating system refused a write."""


class StorageFullError(WriteError):
    """No space, quota or permitted file size is left."""


class PermissionLostError(WriteError):
    """A path of the run may no longer be written."""


class DamagedError(StorageError):
    """Bytes on disk are not the bytes that were written."""


class LedgerError(DamagedError):
    """The ledger holds a damaged record before its end."""


class NotCommittedError(StorageError):
    """The rows asked for belong to a unit that is not in the ledger."""


_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_FORBIDDEN = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


def write_error(error: OSError, path: str | PathLike[str], doing: str) -> WriteError:
    """The `WriteError` that tells a user what `error` means for `path`."""
    reason = error.strerror or str(error)
    if error.errno in _FULL:
        return StorageFullError(
            f"No space left while {doing} {path}: {reason}. Nothing committed is affected; free space (or raise the "
            "quota or file size limit) and give the same command again to resume."
        )
    if error.errno in _FORBIDDEN:
        return PermissionLostError(
            f"Not allowed while {doing} {path}: {reason}. Nothing committed is affected; restore the permission and "
            "give the same command again to resume."
        )
    if error.errno == errno.EMFILE:
        return WriteError(
            f"Too many open files while {doing} {path}. Raise the limit (`ulimit -n`) or use fewer shards a unit."
        )
    return WriteError(
        f"Failed while {doing} {path}: {reason}. Nothing committed is affected; give the same command again once the "
        "cause is gone."
    )


@contextmanager
def reading(path: str | PathLike[str]) -> Iterator[None]:
    """Turn an `OSError` of the body into a `DamagedError` that names `path`."""
    try:
        yield
    except OSError as error:
        raise DamagedError(f"{path} cannot be read: {error.strerror or error}. Run `harvest verify`.") from error


@contextmanager
def writing(path: str | PathLike[str], doing: str) -> Iterator[None]:
    """Turn an `OSError` of the body into a `WriteError` that names `path` and what was `doing`."""
    try:
        yield
    except OSError as error:
        raise write_error(error, path, doing) from error
