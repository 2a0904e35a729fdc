"""Is a local model folder whole? Answered from file headers, before any engine starts.

An engine that meets a truncated weight file dies late, in a worker process, with an error about tensors. Here the
length that a safetensors header promises is compared with the file's size, and the index with the shards, so that the
error names the file. Reads headers only: milliseconds, whatever the model's size.
"""

from __future__ import annotations

import json
import struct
import zipfile
from pathlib import Path
from typing import Any

from harvest.errors import ModelError

_MAX_HEADER_BYTES = 100_000_000  # the safetensors format's own limit
_LFS_MARK = b"version https://git-lfs"


def check_model_folder(folder: Path, *, needs_weights: bool = True) -> None:
    """Raise ModelError unless the folder has a readable config.json and, where needed, whole weight files."""
    if not folder.is_dir():
        raise ModelError(f"No model folder at {folder}. Give a folder with config.json, or a Hugging Face id.")
    config = folder / "config.json"
    if not config.is_file():
        raise ModelError(f"{folder} holds no config.json, so it is no Hugging Face model folder.")
    _read_json(config)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        if (folder / name).is_file():
            _read_json(folder / name)
    if not needs_weights:
        return
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        _check_index(folder, index)
        return
    weights = sorted(folder.glob("*.safetensors"))
    for path in weights:
        read_tensor_names(path)
    if weights:
        return
    index = folder / "pytorch_model.bin.index.json"
    names = set(_weight_map(index).values()) if index.is_file() else {path.name for path in folder.glob("*.bin")}
    for name in sorted(names):
        _check_torch_file(folder / name)
    if not names:
        raise ModelError(
            f"{folder} holds no weights: no model.safetensors, no model.safetensors.index.json, no pytorch_model.bin. "
            "Download the model again, weights included."
        )


def read_tensor_names(path: Path) -> set[str]:
    """Names of the tensors in one safetensors file; ModelError when its size is not what its header says."""
    start = _read_start(path)
    size_bytes = path.stat().st_size
    if len(start) < 8:
        raise _damaged(path, f"it has {size_bytes} bytes")
    (header_bytes,) = struct.unpack("<Q", start[:8])
    if header_bytes > min(_MAX_HEADER_BYTES, size_bytes - 8):
        raise _damaged(path, f"its header should have {header_bytes} bytes, the whole file has {size_bytes}")
    with path.open("rb") as file:
        file.seek(8)
        try:
            header = json.loads(file.read(header_bytes))
            tensors = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
            end = max((offsets[1] for offsets in tensors.values()), default=0)
            expected_bytes = 8 + header_bytes + end
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, UnicodeDecodeError) as error:
            raise _damaged(path, f"its header cannot be read ({error})") from error
    if size_bytes != expected_bytes:
        raise _damaged(path, f"it has {size_bytes} bytes where its header promises {expected_bytes}")
    return set(tensors)


def _check_index(folder: Path, index: Path) -> None:
    by_file: dict[str, set[str]] = {}
    for tensor, name in _weight_map(index).items():
        by_file.setdefault(name, set()).add(tensor)
    missing = sorted(name for name in by_file if not (folder / name).is_file())
    if missing:
        raise ModelError(
            f"{index} names {len(by_file)} weight files; {len(missing)} missing: {', '.join(missing[:5])}"
            f"{', ...' if len(missing) > 5 else ''}. Download them into {folder}."
        )
    for name, tensors in sorted(by_file.items()):
        if lost := tensors - read_tensor_names(folder / name):
            raise _damaged(folder / name, f"it lacks {len(lost)} tensors of the index, {min(lost)} among them")


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} has no weight_map. Download the model again.")
    return weight_map


def _read_start(path: Path) -> bytes:
    """The first bytes of a weight file that is there, and is not a mere pointer to one."""
    if not path.is_file():
        raise ModelError(f"Weight file {path} is missing. Download the model again.")
    try:
        with path.open("rb") as file:
            start = file.read(len(_LFS_MARK))
    except OSError as error:
        raise ModelError(f"Weight file {path} cannot be read: {error.strerror}.") from error
    if start == _LFS_MARK:
        raise ModelError(f"{path} is a Git LFS pointer, not the weights. Run `git lfs pull` in {path.parent}.")
    return start


def _check_torch_file(path: Path) -> None:
    start = _read_start(path)
    # torch.save writes a zip, whose directory lies at the end: a file cut short is none. Old ones are pickles.
    if not start or (start[:2] == b"PK" and not zipfile.is_zipfile(path)):
        raise _damaged(path, f"it has {path.stat().st_size} bytes and is cut short")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ModelError(f"{path} cannot be read: {error}. Download the model again.") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds no JSON object. Download the model again.")
    return content


def _damaged(path: Path, what: str) -> ModelError:
    return ModelError(f"Weight file {path} is damaged: {what}. Download the model again.")
