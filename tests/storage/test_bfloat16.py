"""The bfloat16 type: the same bits in zarr-python, tensorstore and xarray, and refused where it cannot be right."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorstore
import xarray
import zarr
from zarr.dtype import data_type_registry

from storage.bfloat16 import NATIVE, BFloat16, DataTypeValidationError

EVERY_VALUE = np.arange(65536, dtype=np.uint16).reshape(1024, 64)


def by_zarr(path: Path, **options: Any) -> zarr.Array[Any]:
    # Looking for empty chunks compares with the fill value, and numpy warns of every signalling NaN it meets there.
    options["config"] = {"write_empty_chunks": True}
    array = zarr.create_array(
        path, shape=(1024, 64), chunks=(64, 64), shards=(256, 64), dtype=NATIVE, compressors=None, **options
    )
    array[:] = EVERY_VALUE.view(NATIVE)
    return array


def test_zarr_writes_what_tensorstore_reads(folder: Path) -> None:
    by_zarr(folder / "x")
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(folder / "x")}}
    read = tensorstore.open(spec, read=True).result().read().result()
    assert read.dtype == NATIVE
    assert np.array_equal(np.ascontiguousarray(read).view(np.uint16), EVERY_VALUE)


def test_tensorstore_writes_what_zarr_reads(folder: Path) -> None:
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": str(folder / "x")},
        "metadata": {"shape": [1024, 64], "data_type": "bfloat16"},
    }
    tensorstore.open(spec, create=True).result()[:].write(EVERY_VALUE.view(NATIVE)).result()
    read = np.asarray(zarr.open_array(folder / "x", mode="r")[:])
    assert np.array_equal(read.view(np.uint16), EVERY_VALUE)


def test_every_bit_pattern_survives_zarr(folder: Path) -> None:
    array = by_zarr(folder / "x")
    assert np.array_equal(np.asarray(array[:]).view(np.uint16), EVERY_VALUE)
    assert json.loads((folder / "x" / "zarr.json").read_bytes())["data_type"] == "bfloat16"


def test_xarray_opens_it(folder: Path) -> None:
    zarr.create_group(folder / "g")
    by_zarr(folder / "g" / "x", dimension_names=("row", "width_64"))
    data = xarray.open_zarr(folder / "g", consolidated=False)["x"]
    assert data.dims == ("row", "width_64")
    assert np.array_equal(np.asarray(data.values).view(np.uint16), EVERY_VALUE)


@pytest.mark.parametrize("bits", [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x7FC1, 0xFFC0, 0x3F80, 0x0001])
def test_fill_values_keep_their_bits(bits: int) -> None:
    value = np.array(bits, np.uint16).view(NATIVE)[()]
    kind = BFloat16()
    stored = json.loads(json.dumps(kind.to_json_scalar(value, zarr_format=3)))
    assert int(np.array(kind.from_json_scalar(stored, zarr_format=3), NATIVE).view(np.uint16)) == bits


def test_scalars() -> None:
    kind = BFloat16()
    assert kind.cast_scalar(1.5) == ml_dtypes.bfloat16(1.5)
    assert kind.cast_scalar("-Infinity") == ml_dtypes.bfloat16("-inf")
    with pytest.raises(TypeError, match="not a number"):
        kind.cast_scalar("one")
    assert kind.default_scalar() == 0
    assert kind.item_size == 2


def test_what_cannot_be_right_is_refused() -> None:
    with pytest.raises(DataTypeValidationError, match="little-endian"):
        BFloat16(endianness="big").to_native_dtype()
    with pytest.raises(ValueError, match="format 3 only"):
        BFloat16().to_json(2)
    with pytest.raises(DataTypeValidationError):
        BFloat16.from_native_dtype(np.dtype(np.float16))


def test_zarr_finds_it_by_name() -> None:
    assert type(data_type_registry.match_json("bfloat16", zarr_format=3)) is BFloat16
    assert type(data_type_registry.match_dtype(NATIVE)) is BFloat16


def test_a_fresh_process_opens_a_store_without_importing_us(tmp_path):
    """As users do: `zarr.open`, nothing else; the installed entry points bring the data type."""
    from tests.chaos.drive import make_scripted_run

    layout = make_scripted_run(tmp_path / "run", n_prompts=2, n_units=1).layout
    spec = next(iter(layout.arrays.values()))
    folder = tmp_path / "store.zarr" / spec.path
    folder.mkdir(parents=True)
    (tmp_path / "store.zarr" / "zarr.json").write_bytes(b'{"zarr_format": 3, "node_type": "group", "attributes": {}}')
    document = spec.document().replace(b'"float32"', b'"bfloat16"')
    (folder / "zarr.json").write_bytes(document)
    code = f"import zarr; print(zarr.open({str(tmp_path / 'store.zarr')!r}, mode='r')[{spec.path!r}][:1].dtype)"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "bfloat16"
