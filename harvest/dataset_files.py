"""Which files a dataset is made of, in which order, and what their bytes are.

Order is part of the dataset's identity, since records are numbered in it: paths as they are listed, the files of a
folder or a pattern by name, the files of a saved Hugging Face dataset as its `state.json` lists them.
"""

from __future__ import annotations

import difflib
import glob
import io
import json
import lzma
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, cast

import pyarrow as pa
import xxhash

from harvest.errors import DatasetError

Format = Literal["parquet", "jsonl", "text", "arrow"]

_FORMATS: dict[str, Format] = {
    ".parquet": "parquet", ".pq": "parquet",
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".jsonlines": "jsonl", ".json": "jsonl",
    ".txt": "text", ".text": "text",
    ".arrow": "arrow", ".feather": "arrow", ".ipc": "arrow",
}  # fmt: skip
_COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".zstd": "zstd", ".xz": "xz", ".lz4": "lz4"}
_MAGIC = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bz2",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\xfd7zXZ\x00": "xz",
    b"\x04\x22\x4d\x18": "lz4",
}
_SUFFIXES_TEXT = ", ".join(_FORMATS)
_METADATA = ("dataset_info.json", "dataset_infos.json")
_HASH_BYTES = 1 << 22
_XZ_BYTES = 1 << 18


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFile:
    """One file of a dataset."""

    path: Path
    name: str
    """Relative to the folder, or to the fixed part of the pattern, that led to it; for messages and the fingerprint."""
    format: Format
    compression: str | None
    """gzip, bz2, zstd, xz or lz4."""
    n_bytes: int

    def open(self) -> IO[bytes]:
        """The decompressed bytes as a stream; reading raises OSError, EOFError or LZMAError where they are damaged."""
        if self.compression == "xz":
            return io.BufferedReader(_XzStream(self.path), 1 << 20)
        if self.compression:
            return cast("IO[bytes]", pa.input_stream(str(self.path), compression=self.compression))
        return open(self.path, "rb", buffering=0)

    def damaged(self, error: BaseException) -> DatasetError:
        """The error for bytes that cannot be read as what they claim to be."""
        what = f"{self.compression}-compressed {self.format}" if self.compression else self.format
        return DatasetError(
            f"{self.path} is damaged or is no {what} file: {error}. Get the file again, set dataset.format if its name "
            "misleads, or leave it out of dataset.path"
        )


class _XzStream(io.RawIOBase):
    """Decompressed bytes of an xz file. Unlike `lzma.open`, it takes no damaged later part for harmless padding."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "rb")
        self._decompressor = lzma.LZMADecompressor()
        self._is_between = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        while True:
            compressed = b""
            if self._decompressor.eof:
                compressed = self._decompressor.unused_data
                self._decompressor = lzma.LZMADecompressor()
                self._is_between = True
            if self._is_between:
                compressed = (compressed or self._file.read(_XZ_BYTES)).lstrip(b"\0")
                if not compressed:
                    if self._file.peek(1):
                        continue
                    return 0
                self._is_between = False
            elif self._decompressor.needs_input:
                compressed = self._file.read(_XZ_BYTES)
                if not compressed:
                    raise EOFError("the compressed data ends early")
            data = self._decompressor.decompress(compressed, len(buffer))
            if data:
                buffer[: len(data)] = data
                return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


def find_files(paths: Sequence[str], format: Format | Literal["auto"], base: Path) -> tuple[DataFile, ...]:
    """Resolve files, folders and patterns, relative to `base`.

    Raises:
        DatasetError: nothing there, a file without bytes, one file twice, or a format that cannot be told.
    """
    files: list[DataFile] = []
    seen: dict[Path, str] = {}
    for path in paths:
        for file, name in _resolve(path, base):
            real = file.resolve()
            if real in seen:
                raise DatasetError(f'{file} is in the dataset twice, by "{seen[real]}" and by "{path}": list it once')
            seen[real] = path
            files.append(_describe(file, name, format))
    formats = sorted({file.format for file in files})
    if len(formats) > 1:
        examples = ", ".join(f"{next(f.name for f in files if f.format == kind)} ({kind})" for kind in formats)
        raise DatasetError(
            f'the dataset mixes formats: {examples}. Name the files with a pattern such as "folder/*.parquet"'
        )
    return tuple(files)


def fingerprint(files: Iterable[DataFile], settings: object) -> str:
    """Hash (hex) of names, sizes and bytes of all files and of `settings` (JSON-ready); reads every byte once."""
    listed = list(files)
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        hashes = list(pool.map(_hash_file, listed))
    content = [[file.name, file.n_bytes, digest] for file, digest in zip(listed, hashes, strict=True)]
    return xxhash.xxh3_128_hexdigest(json.dumps([content, settings], sort_keys=True).encode())


def _hash_file(file: DataFile) -> str:
    digest = xxhash.xxh3_128()
    buffer = bytearray(_HASH_BYTES)
    try:
        with open(file.path, "rb", buffering=0) as stream:
            while n_read := stream.readinto(buffer):
                digest.update(memoryview(buffer)[:n_read])
    except OSError as error:
        raise DatasetError(f"cannot read {file.path}: {error.strerror}") from error
    return digest.hexdigest()


def _resolve(path: str, base: Path) -> list[tuple[Path, str]]:
    if "://" in path:
        raise DatasetError(f"{path} is a URL; datasets are read from local or mounted files: download it first")
    full = base / Path(path).expanduser()
    if full.is_dir():
        return _folder_files(full)
    if full.exists():
        return [(full, full.name)]
    if glob.has_magic(path):
        return _pattern_files(str(full))
    if not path:
        raise DatasetError("dataset.path is empty")
    raise DatasetError(f"there is no file or folder {full}{_close_names(full)}")


def _close_names(path: Path) -> str:
    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        return f", nor a folder {path.parent}"
    close = difflib.get_close_matches(path.name, names, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def _pattern_files(pattern: str) -> list[tuple[Path, str]]:
    matches = sorted(Path(match) for match in glob.glob(pattern, recursive=True))
    if not matches:
        raise DatasetError(f"no file matches {pattern}")
    parts = Path(pattern).parts
    n_fixed = next(index for index, part in enumerate(parts) if glob.has_magic(part))
    fixed = Path(*parts[:n_fixed])
    files = [match for match in matches if match.is_file()]
    if files:
        return [(file, file.relative_to(fixed).as_posix()) for file in files]
    return [
        (file, (folder.relative_to(fixed) / name).as_posix())
        for folder in matches
        for file, name in _folder_files(folder)
    ]


def _folder_files(folder: Path) -> list[tuple[Path, str]]:
    if (folder / "dataset_dict.json").is_file():
        splits = _read_json(folder / "dataset_dict.json").get("splits", [])
        choices = " or ".join(f'"{folder / str(split)}"' for split in splits)
        raise DatasetError(
            f"{folder} holds a dataset with the splits {', '.join(splits)}: set dataset.path to {choices}"
        )
    if (folder / "state.json").is_file():
        return _saved_dataset_files(folder)
    found = sorted(
        path
        for path in folder.rglob("*")
        if path.is_file()
        and _format_of(path.name)
        and path.name not in _METADATA
        and not any(part.startswith((".", "_")) for part in path.relative_to(folder).parts)
    )
    if not found:
        raise DatasetError(f"the folder {folder} has no data file ({_SUFFIXES_TEXT}, compressed or not)")
    return [(path, path.relative_to(folder).as_posix()) for path in found]


def _saved_dataset_files(folder: Path) -> list[tuple[Path, str]]:
    state = _read_json(folder / "state.json")
    if state.get("_indices_data_files"):
        raise DatasetError(f"{folder} was saved with an index over its rows: save it again after `flatten_indices()`")
    names = [str(entry["filename"]) for entry in state.get("_data_files", [])]
    if not names:
        raise DatasetError(f"{folder}/state.json lists no data file")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise DatasetError(f"{folder} is incomplete: {', '.join(missing[:3])} of {len(names)} data files not there")
    return [(folder / name, name) for name in names]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DatasetError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise DatasetError(f"{path} is no JSON object")
    return content


def _format_of(name: str) -> Format | None:
    stem, suffix = os.path.splitext(name.lower())
    if suffix in _COMPRESSIONS:
        suffix = os.path.splitext(stem)[1]
    return _FORMATS.get(suffix)


def _describe(path: Path, name: str, wanted: Format | Literal["auto"]) -> DataFile:
    format = _format_of(path.name) if wanted == "auto" else wanted
    if format is None:
        raise DatasetError(
            f"the name of {path} does not tell its format (known: {_SUFFIXES_TEXT}, compressed or not): set "
            "dataset.format"
        )
    try:
        n_bytes = path.stat().st_size
        with open(path, "rb") as stream:
            head = stream.read(8)
    except OSError as error:
        raise DatasetError(f"cannot read {path}: {error.strerror}") from error
    if not n_bytes:
        raise DatasetError(f"{path} is empty (0 bytes): get the file again or leave it out of dataset.path")
    compression = _COMPRESSIONS.get(os.path.splitext(path.name.lower())[1]) or next(
        (kind for magic, kind in _MAGIC.items() if head.startswith(magic)), None
    )
    if compression and format == "parquet":
        raise DatasetError(f"{path} is a compressed parquet file, which cannot be read in pieces: decompress it first")
    return DataFile(path=path, name=name, format=format, compression=compression, n_bytes=n_bytes)
