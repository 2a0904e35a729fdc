"""The run's event stream: one JSON object a line in `events.jsonl`. Progress, summary and reports derive from it."""

from __future__ import annotations

import json
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
        self._file: TextIO = path.open("a", encoding="utf-8", buffering=1)
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
