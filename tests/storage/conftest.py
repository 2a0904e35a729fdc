"""Fixtures of the store's tests."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import storage.bfloat16  # noqa: F401  zarr knows the type, installed or not


@pytest.fixture
def folder() -> Iterator[Path]:
    """An empty folder in memory where there is one: these tests sync often and want no disk."""
    shared = Path("/dev/shm")
    base = shared if os.access(shared, os.W_OK) else None
    path = Path(tempfile.mkdtemp(prefix="harvest-store-", dir=base))
    yield path
    shutil.rmtree(path, ignore_errors=True)
