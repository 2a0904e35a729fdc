"""The run's event stream: one JSON object a line in `events.jsonl`. Progress, summary and reports derive from it.

A line that a crash has torn is ended when the file is opened again, so that it cannot swallow the event after it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO


class EventLog:
    """Appends events to a file and shows each to the listeners.

    Args:
        path: the file, made if it is not there.
        listeners: called with each event.
    """

    def __init__(self, path: Path, *listeners: Callable[[dict[str, Any]], None]) -> None:
        is_torn = _is_torn(path)
        self._file: TextIO = path.open("a", encoding="utf-8", buffering=1)
        if is_torn:
            self._file.write("\n")
        self._listeners = listeners

    def emit(self, event: str, **fields: Any) -> None:
        """Record an event with the wall-clock time in seconds."""
        record = {"time_s": round(time.time(), 3), "event": event, **fields}
        self._file.write(json.dumps(record) + "\n")
        for listener in self._listeners:
            listener(record)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def _is_torn(path: Path) -> bool:
    if not path.exists() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"
