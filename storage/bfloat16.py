"""The Zarr data type `bfloat16`, so that zarr-python opens what a run stores.

It is found by zarr through the entry point group `zarr.data_type`; importing this module registers it too, which
covers a source tree that is not installed. Scalars keep their bits: a NaN with a payload and a negative zero come
back as such. Only the little-endian form exists, because numpy cannot swap the bytes of this type.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import ml_dtypes
import numpy as np
import zarr.dtype
import zarr.errors
from zarr.core.dtype.common import HasEndianness, HasItemSize
from zarr.dtype import ZDType, data_type_registry

# zarr 3.1 keeps it with the data types, later versions with the errors.
_HOME: Any = zarr.errors if hasattr(zarr.errors, "DataTypeValidationError") else zarr.dtype
DataTypeValidationError: type[ValueError] = _HOME.DataTypeValidationError

NATIVE = np.dtype(ml_dtypes.bfloat16)
_SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True, kw_only=True)
class BFloat16(ZDType[Any, Any], HasEndianness, HasItemSize):
    """`bfloat16` as registered in the Zarr extensions; native dtype `ml_dtypes.bfloat16`."""

    dtype_cls: ClassVar[Any] = type(NATIVE)
    _zarr_v3_name: ClassVar[str] = "bfloat16"

    @property
    def item_size(self) -> int:
        """Bytes a value takes."""
        return 2

    @classmethod
    def from_native_dtype(cls, dtype: Any) -> Self:
        """The Zarr data type of a numpy dtype; anything but bfloat16 is refused."""
        if dtype == NATIVE:
            return cls()
        raise DataTypeValidationError(f"{dtype} is not bfloat16.")

    def to_native_dtype(self) -> Any:
        """`ml_dtypes.bfloat16`; big-endian data is refused, since it would be read with swapped bytes."""
        if self.endianness != "little":
            raise DataTypeValidationError("bfloat16 is supported in little-endian order only.")
        return NATIVE

    @classmethod
    def _from_json_v2(cls, data: Any) -> Self:
        raise DataTypeValidationError("bfloat16 does not exist in Zarr format 2.")

    @classmethod
    def _from_json_v3(cls, data: Any) -> Self:
        if data == cls._zarr_v3_name:
            return cls()
        raise DataTypeValidationError(f"{data!r} is not {cls._zarr_v3_name!r}.")

    def to_json(self, zarr_format: Any) -> Any:
        """The name that `zarr.json` carries."""
        if zarr_format != 3:
            raise ValueError("bfloat16 exists in Zarr format 3 only; open the array with zarr_format=3.")
        return self._zarr_v3_name

    def _check_scalar(self, data: object) -> bool:
        return isinstance(data, int | float | np.integer | np.floating | ml_dtypes.bfloat16) or data in _SPECIAL

    def cast_scalar(self, data: object) -> Any:
        """`data` as a bfloat16 scalar; `TypeError` for what is not a number."""
        if isinstance(data, ml_dtypes.bfloat16):
            return data
        if isinstance(data, str) and data in _SPECIAL:
            return NATIVE.type(_SPECIAL[data])
        if isinstance(data, int | float | np.integer | np.floating):
            return NATIVE.type(data)
        raise TypeError(f"{data!r} is not a number that bfloat16 can hold.")

    def default_scalar(self) -> Any:
        """Zero."""
        return NATIVE.type(0)

    def from_json_scalar(self, data: Any, *, zarr_format: Any) -> Any:
        """A fill value: a number, a special name, or the bits as `0x` and four hex digits."""
        if isinstance(data, str) and data.startswith("0x") and len(data) == 6:
            return np.array(int(data, 16), np.uint16).view(NATIVE)[()]
        return self.cast_scalar(data)

    def to_json_scalar(self, data: object, *, zarr_format: Any) -> Any:
        """The fill value as JSON; a NaN with a payload becomes its bits."""
        scalar = self.cast_scalar(data)
        value = float(scalar)
        if math.isnan(value):
            bits = int(np.array(scalar, NATIVE).view(np.uint16))
            return "NaN" if bits == 0x7FC0 else f"0x{bits:04x}"
        if math.isinf(value):
            return "Infinity" if value > 0 else "-Infinity"
        return value


def register() -> None:
    """Make zarr know the data type; harmless when it does already."""
    if BFloat16._zarr_v3_name not in data_type_registry.contents:
        data_type_registry.register(BFloat16._zarr_v3_name, BFloat16)


register()
