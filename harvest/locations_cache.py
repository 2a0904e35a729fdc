"""Answers of `actors.locations_probe` from earlier plans: vLLM needs 12 to 25 s of CPU for one, a file 0.2 s.

One file an answer, in `locations` of the cache folder (`harvest.models.cache_folder`), named by what decides the answer
(`harvest.locations_key`). HARVEST_LOCATIONS_CACHE=0 in the environment turns the cache off.

Invariants: an answer from here is equal to the probe's. Errors are not kept. A file is whole (written aside and
renamed), so processes share a folder without locks; a damaged or foreign one is written anew. A folder that cannot be
read or written costs the probe, never an error.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from actors.locations_probe import describe_model, probe_locations
from harvest.locations_key import answer_key
from harvest.models import cache_folder

_Answer = list[dict[str, Any]]
_SWITCH = "HARVEST_LOCATIONS_CACHE"
_OFF = ("0", "false", "no", "off")
_MAX_FILES = 200


def find_locations(model: str, names: Sequence[str], engine_args: Mapping[str, Any] | None = None) -> _Answer:
    """As `actors.locations_probe.probe_locations`, with its errors."""
    return _find("locations", model, names, engine_args, lambda: probe_locations(model, names, engine_args))


def find_modules(model: str, engine_args: Mapping[str, Any] | None = None) -> _Answer:
    """As `actors.locations_probe.describe_model`, with its errors."""
    return _find("modules", model, (), engine_args, lambda: describe_model(model, engine_args))


def _find(
    question: str,
    model: str,
    names: Sequence[str],
    engine_args: Mapping[str, Any] | None,
    ask: Callable[[], _Answer],
) -> _Answer:
    key = None if _is_off() else answer_key(question, model, names, engine_args)
    if key is None:
        return ask()
    kept = _read(key)
    if kept is not None:
        return kept
    answer = ask()
    # Files that changed while the probe read them may have another answer; and one that tells the folder is of no use
    # to the same model elsewhere.
    if answer_key(question, model, names, engine_args) == key and str(Path(model).absolute()) not in json.dumps(answer):
        _write(key, answer)
    return answer


def _is_off() -> bool:
    return os.environ.get(_SWITCH, "").strip().lower() in _OFF


def _read(key: str) -> _Answer | None:
    """The answer that was kept under a key, None where there is no whole one."""
    try:
        path = _path(key)
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["check"] != _check(key, kept["answer"]):
            return None
    except (OSError, RuntimeError, ValueError, LookupError, TypeError):
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # those that are asked for stay longest
    answer: _Answer = kept["answer"]
    return answer


def _write(key: str, answer: _Answer) -> None:
    text = json.dumps({"check": _check(key, answer), "answer": answer})
    with contextlib.suppress(OSError, RuntimeError):
        path = _path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
        try:
            aside.write_text(text, encoding="utf-8")
            os.replace(aside, path)
        finally:
            aside.unlink(missing_ok=True)
        _drop_oldest(path.parent)


def _drop_oldest(folder: Path) -> None:
    """Bound the folder, with what killed processes left in it."""
    times = {}
    for path in folder.glob("*.json*"):
        with contextlib.suppress(FileNotFoundError):  # another process drops files too
            times[path] = path.stat().st_mtime_ns
    for path in sorted(times, key=times.__getitem__, reverse=True)[_MAX_FILES:]:
        path.unlink(missing_ok=True)


def _path(key: str) -> Path:
    """RuntimeError where the user has no home."""
    return cache_folder() / "locations" / f"{key}.json"


def _check(key: str, answer: _Answer) -> str:
    """Ties an answer to its key, so that neither may change."""
    return hashlib.sha256(f"{key} {json.dumps(answer)}".encode()).hexdigest()
