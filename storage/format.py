"""What a run's Zarr store looks like: names, shapes, dtypes, chunks and the metadata documents.

`docs/format.md` is the prose of this module. A layout is fixed when a run is made and never changes: every row's place
follows from it and from the plan. One Zarr group holds one array a location plus the labels of its rows:

    acts/<name>                          [N, width]
    tokens/{id,position,invoke,logprob}  [N]
    index/{row_start,n_rows,n_prompt_tokens,unit,status}  [P], in finished runs only

N = units x k x R rows: unit u owns the k whole shards u*k .. u*k+k-1 of every array.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Literal

import ml_dtypes
import numpy as np

from storage.errors import FormatError

FORMAT_VERSION = 1
CHUNK_ROWS = 64
"""Rows of an inner chunk of `acts/*`; small, because the direct encoder pays nothing for it and random reads gain."""
LABEL_CHUNK_ROWS = 8192
"""Most rows of an inner chunk of `tokens/*`, whose rows are a few bytes wide."""
INDEX_CHUNK_ROWS = 65536
"""Rows of a chunk of `index/*`."""

ActivationType = Literal["bfloat16", "float16", "float32"]
Compression = Literal["zstd"]
STATUSES = ("ok", "skipped", "truncated", "quarantined")
"""Names of the codes in `index/status`, in code order."""
INDEX_ARRAYS = {"row_start": "int64", "n_rows": "int32", "n_prompt_tokens": "int32", "unit": "int32", "status": "uint8"}
INDEX_FILLS = {"row_start": -1, "n_rows": 0, "n_prompt_tokens": 0, "unit": -1, "status": 0}

_SAFE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")


@cache
def numpy_dtype(name: str) -> np.dtype[Any]:
    """The little-endian numpy dtype of a Zarr data type name."""
    if name == "bfloat16":
        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name).newbyteorder("<")


@dataclass(frozen=True, kw_only=True, slots=True)
class LocationSpec:
    """One location of a run as the store knows it.

    `name` names the array (`acts/<name>`), `path` is the module path with its side, as the user writes it, and `alias`
    the short form where there is one. `width` counts values a row, `dtype` is the stored type.
    """

    name: str
    path: str
    alias: str | None = None
    width: int
    dtype: ActivationType = "bfloat16"

    def __post_init__(self) -> None:
        if not _SAFE_NAME.fullmatch(self.name) or self.name.startswith("__") or set(self.name) == {"."}:
            raise FormatError(
                f"{self.name!r} cannot name an array: use letters, digits, '.', '_' and '-', begin with a letter, a "
                "digit or a single '_', and stay within 200 characters."
            )
        if self.width < 1:
            raise FormatError(f"Location {self.name!r} has width {self.width}; it must be at least 1.")
        if self.dtype not in ("bfloat16", "float16", "float32"):
            raise FormatError(f"Location {self.name!r}: dtype {self.dtype!r} is none of bfloat16, float16, float32.")

    @property
    def array(self) -> str:
        """Path of its array inside the store."""
        return f"acts/{self.name}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ArraySpec:
    """Shape and encoding of one array. `chunks` is the inner chunk where `shards` is given, else the whole chunk."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[int, ...]
    shards: tuple[int, ...] | None
    fill: int | float
    compression: Compression | None
    dimensions: tuple[str, ...]
    attributes: dict[str, Any]

    @property
    def native(self) -> np.dtype[Any]:
        """Numpy dtype of the values."""
        return numpy_dtype(self.dtype)

    @property
    def width(self) -> int:
        """Values a row."""
        return self.shape[1] if len(self.shape) == 2 else 1

    @property
    def row_bytes(self) -> int:
        """Bytes of one row before compression."""
        return self.width * self.native.itemsize

    def chunk_key(self, number: int) -> str:
        """File name of shard (or unsharded chunk) `number`, relative to the array."""
        return f"c.{number}" + ".0" * (len(self.shape) - 1)

    def file(self, number: int) -> str:
        """Path of shard (or unsharded chunk) `number`, relative to the store."""
        return f"{self.path}/{self.chunk_key(number)}"

    def document(self) -> bytes:
        """The array's `zarr.json`."""
        little = {"name": "bytes", "configuration": {"endian": "little"}}
        if np.dtype(self.native).itemsize == 1:
            little = {"name": "bytes"}
        codecs: list[dict[str, Any]] = [little]
        if self.compression == "zstd":
            codecs.append({"name": "zstd", "configuration": {"level": 1, "checksum": False}})
        if self.shards is not None:
            index = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
            sharding = {
                "chunk_shape": list(self.chunks),
                "codecs": codecs,
                "index_codecs": index,
                "index_location": "end",
            }
            codecs = [{"name": "sharding_indexed", "configuration": sharding}]
        grid = {"name": "regular", "configuration": {"chunk_shape": list(self.shards or self.chunks)}}
        return json_document(
            {
                "zarr_format": 3,
                "node_type": "array",
                "shape": list(self.shape),
                "data_type": self.dtype,
                "chunk_grid": grid,
                "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
                "fill_value": "NaN" if math.isnan(self.fill) else self.fill,
                "codecs": codecs,
                "dimension_names": list(self.dimensions),
                "attributes": self.attributes,
                "storage_transformers": [],
            }
        )


def json_document(content: dict[str, Any]) -> bytes:
    """`content` as the indented JSON that metadata files hold."""
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def group_document(attributes: dict[str, Any]) -> bytes:
    """The `zarr.json` of a group."""
    return json_document({"zarr_format": 3, "node_type": "group", "attributes": attributes})


@dataclass(frozen=True, kw_only=True)
class StoreLayout:
    """Everything that fixes where each row of a run lies.

    `rows_per_shard` (R) and `shards_per_unit` (k) are whole numbers with R a multiple of `chunk_rows`; `n_units`
    units and `n_invokes` invokes (numbered 0 .. n_invokes-1, the skipped ones included); `plan_hash` ties the store
    to its plan. `logprobs` adds `tokens/logprob`; with `nan_logprobs`, as all new runs with log-probabilities have it,
    its holes are NaN.
    """

    locations: tuple[LocationSpec, ...]
    rows_per_shard: int
    shards_per_unit: int
    n_units: int
    n_invokes: int
    chunk_rows: int = CHUNK_ROWS
    compression: Compression | None = None
    plan_hash: str = ""
    logprobs: bool = False
    nan_logprobs: bool = False

    def __post_init__(self) -> None:
        names = [location.name.casefold() for location in self.locations]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise FormatError(f"Two locations share the array name {twice[0]!r} (upper and lower case count as equal).")
        for name in ("rows_per_shard", "shards_per_unit", "chunk_rows"):
            if getattr(self, name) < 1:
                raise FormatError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if self.n_units < 0 or self.n_invokes < 0:
            raise FormatError("A layout cannot have a negative number of units or invokes.")
        if self.rows_per_shard % self.chunk_rows:
            raise FormatError(
                f"rows_per_shard ({self.rows_per_shard}) must be a multiple of chunk_rows ({self.chunk_rows})."
            )
        if self.compression not in (None, "zstd"):
            raise FormatError(f"Compression {self.compression!r} is neither None nor 'zstd'.")

    @property
    def unit_rows(self) -> int:
        """Rows a unit owns in every array: k x R."""
        return self.shards_per_unit * self.rows_per_shard

    @property
    def n_rows(self) -> int:
        """Rows of every array, holes included: N."""
        return self.n_units * self.unit_rows

    @property
    def n_shards(self) -> int:
        """Shards of every array."""
        return self.n_units * self.shards_per_unit

    @property
    def token_arrays(self) -> tuple[str, ...]:
        """Paths of the label arrays."""
        names = ("tokens/id", "tokens/position", "tokens/invoke")
        return (*names, "tokens/logprob") if self.logprobs else names

    @cached_property
    def arrays(self) -> dict[str, ArraySpec]:
        """The arrays that units write, by path: locations first, then labels."""
        specs = [self._activation(location) for location in self.locations]
        specs += [self._label(path) for path in self.token_arrays]
        return {spec.path: spec for spec in specs}

    @cached_property
    def index_arrays(self) -> dict[str, ArraySpec]:
        """The arrays that finalising writes, by path."""
        return {f"index/{name}": self._index(name) for name in INDEX_ARRAYS}

    def array(self, path: str) -> ArraySpec:
        """The array at `path`; `FormatError` lists the known ones."""
        try:
            return self.arrays[path]
        except KeyError:
            raise FormatError(f"The store has no array {path!r}; it has {', '.join(self.arrays)}.") from None

    def shards_of(self, unit: int) -> range:
        """Numbers of the shards that `unit` owns."""
        if not 0 <= unit < self.n_units:
            raise FormatError(f"Unit {unit} does not exist: the run has units 0 to {self.n_units - 1}.")
        return range(unit * self.shards_per_unit, (unit + 1) * self.shards_per_unit)

    def rows_of(self, unit: int) -> range:
        """Global rows that `unit` owns."""
        shards = self.shards_of(unit)
        return range(shards.start * self.rows_per_shard, shards.stop * self.rows_per_shard)

    def unit_files(self, unit: int) -> list[tuple[str, int]]:
        """(array, shard) of every file that makes up `unit`."""
        return [(path, shard) for path in self.arrays for shard in self.shards_of(unit)]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row over all arrays, before compression."""
        return sum(spec.row_bytes for spec in self.arrays.values())

    @property
    def location_row_bytes(self) -> int:
        """Bytes of one row at all locations, without labels, before compression."""
        return sum(self.arrays[location.array].row_bytes for location in self.locations)

    @property
    def n_files(self) -> int:
        """Shard files of the finished store."""
        return self.n_shards * len(self.arrays)

    def predicted_bytes(self, rows: int) -> int:
        """Bytes of the store with `rows` stored rows: rows, shard indexes, per-invoke index; before compression."""
        shard_indexes = sum(
            self.n_shards * (16 * (self.rows_per_shard // spec.chunks[0]) + 4) for spec in self.arrays.values()
        )
        per_invoke = sum(spec.native.itemsize for spec in self.index_arrays.values())
        return rows * self.row_bytes + shard_indexes + self.n_invokes * per_invoke

    def documents(self) -> dict[str, bytes]:
        """Every `zarr.json` written at creation, by path relative to the store."""
        documents = {
            "zarr.json": group_document({"harvest": {"format_version": FORMAT_VERSION, **self.to_json()}}),
            "acts/zarr.json": group_document({}),
            "tokens/zarr.json": group_document({}),
        }
        return documents | {f"{path}/zarr.json": spec.document() for path, spec in self.arrays.items()}

    def index_documents(self) -> dict[str, bytes]:
        """Every `zarr.json` written at finalise, by path relative to the store."""
        documents = {"index/zarr.json": group_document({})}
        return documents | {f"{path}/zarr.json": spec.document() for path, spec in self.index_arrays.items()}

    def to_json(self) -> dict[str, Any]:
        """The layout as plain JSON values; `from_json` reverses it."""
        return {
            "plan_hash": self.plan_hash,
            "n_units": self.n_units,
            "n_invokes": self.n_invokes,
            "rows_per_shard": self.rows_per_shard,
            "shards_per_unit": self.shards_per_unit,
            "chunk_rows": self.chunk_rows,
            "compression": self.compression,
            "logprobs": self.logprobs,
            # Only where it is true, since the first runs have no such key.
            **({"nan_logprobs": True} if self.nan_logprobs else {}),
            "locations": [
                {"name": x.name, "path": x.path, "alias": x.alias, "width": x.width, "dtype": x.dtype}
                for x in self.locations
            ],
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> StoreLayout:
        """The layout that `to_json` wrote; `FormatError` where a field is missing or unknown."""
        try:
            locations = tuple(LocationSpec(**location) for location in content["locations"])
            return cls(**{**content, "locations": locations})
        except (TypeError, KeyError) as error:
            raise FormatError(f"Not a store layout: {error}.") from None

    def _activation(self, location: LocationSpec) -> ArraySpec:
        return ArraySpec(
            path=location.array,
            shape=(self.n_rows, location.width),
            dtype=location.dtype,
            chunks=(self.chunk_rows, location.width),
            shards=(self.rows_per_shard, location.width),
            fill=0.0,
            compression=self.compression,
            dimensions=("row", f"width_{location.width}"),
            attributes={"path": location.path, "alias": location.alias},
        )

    def _label(self, path: str) -> ArraySpec:
        dtype, fill = {
            "tokens/id": ("int32", 0),
            "tokens/position": ("int32", 0),
            "tokens/invoke": ("int64", -1),
            "tokens/logprob": ("float32", math.nan if self.nan_logprobs else 0.0),
        }[path]
        chunk_rows = self.chunk_rows
        while chunk_rows * 2 <= LABEL_CHUNK_ROWS and self.rows_per_shard % (chunk_rows * 2) == 0:
            chunk_rows *= 2
        return ArraySpec(
            path=path,
            shape=(self.n_rows,),
            dtype=dtype,
            chunks=(chunk_rows,),
            shards=(self.rows_per_shard,),
            fill=fill,
            compression=None,
            dimensions=("row",),
            attributes={},
        )

    def _index(self, name: str) -> ArraySpec:
        return ArraySpec(
            path=f"index/{name}",
            shape=(self.n_invokes,),
            dtype=INDEX_ARRAYS[name],
            chunks=(max(1, min(INDEX_CHUNK_ROWS, self.n_invokes)),),
            shards=None,
            fill=INDEX_FILLS[name],
            compression=None,
            dimensions=("invoke",),
            attributes={"names": list(STATUSES)} if name == "status" else {},
        )
