"""What tells one local model from another: a fingerprint of the files that decide its rows.

Read where the run is planned, where it is resumed, and on each node before an engine loads the model: a folder may have
been overwritten by a newer checkpoint, or hold another one on another machine. Of each tensor three small pieces are
hashed, so a model of hundreds of gigabytes takes seconds; a tensor that was trained or edited differs in nearly all of
its values. Names, sizes and configurations are hashed whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PIECE_BYTES = 4096
# Of a file whose tensors are not known by place.
_PIECES = 1024
_READERS = 8
_MAX_HEADER_BYTES = 100_000_000  # the safetensors format's own limit
_CONFIGS = ("config.json", "generation_config.json", "quantize_config.json", "hf_quant_config.json")
# Kinds of weight files, of which vLLM loads the first that is there.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")
# What trainers leave beside a checkpoint.
_NO_WEIGHTS = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")


class ModelChanged(ValueError):
    """The model is not the one that the run was planned for."""


def fingerprint_model(model: str) -> str | None:
    """SHA-256 (hex) of a local model's names, sizes, configurations, code and pieces of its weights.

    Args:
        model: a folder or a file; None comes back for anything else (a Hugging Face id, which has a commit).

    Raises:
        OSError: a file cannot be read.
    """
    path = Path(model)
    if not path.exists():
        return None
    files = [path] if path.is_file() else _deciding_files(path)
    digest = hashlib.sha256()
    with ThreadPoolExecutor(_READERS) as pool:
        for file, content in zip(files, pool.map(_digest_file, files), strict=True):
            digest.update(f"{file.name}\0{content}\0".encode())
    return digest.hexdigest()


def check_model(model: str, planned: str | None) -> None:
    """Refuse a model that is not the planned one.

    Args:
        model: as for `fingerprint_model`.
        planned: its fingerprint when the run was planned; None: unknown, anything goes.

    Raises:
        ModelChanged: says which model, and what to do.
    """
    if planned is None:
        return
    found = fingerprint_model(model)
    if found != planned:
        what = "its files are others" if found is not None else "it is not there"
        raise ModelChanged(
            f"the model {model} is not the one that the run was planned for: {what} on {os.uname().nodename}. Bring "
            "the old files back, or plan a new run under another store.path"
        )


def _deciding_files(folder: Path) -> list[Path]:
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and not path.name.startswith(".")]
    weights: Sequence[Path] = ()
    for suffix in _WEIGHTS:
        weights = weights or [path for path in files if path.suffix == suffix and path.name not in _NO_WEIGHTS]
    others = [
        path
        for path in files
        if path.name in _CONFIGS
        or path.suffix == ".py"
        or path.name.endswith((".safetensors.index.json", ".bin.index.json"))
    ]
    return [*others, *weights]


def _digest_file(path: Path) -> str:
    if path.suffix not in _WEIGHTS:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    with path.open("rb") as file:
        n_bytes = os.fstat(file.fileno()).st_size
        digest = hashlib.sha256(str(n_bytes).encode())
        begin, spans = _tensors(file.fileno(), n_bytes) if path.suffix == ".safetensors" else (0, [(0, n_bytes)])
        digest.update(os.pread(file.fileno(), min(begin, n_bytes), 0))
        pieces = _PIECES if len(spans) == 1 else 3
        for start, end in spans:
            for place in _places(begin + start, begin + end, pieces):
                digest.update(os.pread(file.fileno(), PIECE_BYTES, place))
    return digest.hexdigest()


def _tensors(fd: int, n_bytes: int) -> tuple[int, list[tuple[int, int]]]:
    """Where a safetensors file's data begins, and its tensors from there on; the whole file where it is none."""
    start = os.pread(fd, 8, 0)
    size = struct.unpack("<Q", start)[0] if len(start) == 8 else n_bytes
    if size > min(_MAX_HEADER_BYTES, n_bytes - 8):
        return 0, [(0, n_bytes)]
    try:
        header = json.loads(os.pread(fd, size, 8))
        spans = [tuple(entry["data_offsets"]) for name, entry in header.items() if name != "__metadata__"]
    except (ValueError, TypeError, KeyError, AttributeError):
        return 0, [(0, n_bytes)]
    return 8 + size, sorted((int(first), int(last)) for first, last in spans)


def _places(start: int, end: int, pieces: int) -> Iterable[int]:
    """Where pieces begin: evenly spread, the first at the start and the last at the end."""
    last = max(start, end - PIECE_BYTES)
    return sorted({start + (last - start) * index // max(1, pieces - 1) for index in range(pieces)})
