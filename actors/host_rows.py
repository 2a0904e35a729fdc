"""Rows on their way to host memory, as the sink sees them; free of torch."""

from __future__ import annotations

from typing import Any, Protocol

from numpy.typing import NDArray


class HostRows(Protocol):
    """Rows that are, or will be, in host memory."""

    n_bytes: int

    def wait(self) -> NDArray[Any]:
        """Block until the rows are in host memory; return them as [rows, width] or [rows]."""
        ...


class ArrayRows:
    """Rows that are in host memory already."""

    def __init__(self, rows: NDArray[Any]) -> None:
        self._rows = rows
        self.n_bytes = rows.nbytes

    def wait(self) -> NDArray[Any]:
        """The rows."""
        return self._rows
