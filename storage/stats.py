"""Statistics of a location's rows, gathered while they are written.

Exact for every row: how many, how many all zero, how many with a value that is not finite, the largest magnitude, and
the rows of largest magnitude (massive activations sit in single rows). From every `SAMPLE_STRIDE`-th row of a unit:
mean and variance of the values and a histogram of row norms. The exact part needs no conversion: the bits of a float
without its sign, read as an unsigned integer, keep the order of magnitudes.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

SAMPLE_STRIDE = 64
"""Of this many rows one is used for mean, variance and norms."""
LARGEST_ROWS = 8
"""How many rows of largest magnitude are kept by number."""
BINS_PER_OCTAVE = 32
"""Resolution of the norm histogram: 2.2 % a bin."""

_INFINITY_BITS = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000}


@dataclass(frozen=True, kw_only=True, slots=True)
class LocationStatistics:
    """Statistics of one location over some rows.

    `largest` lists (magnitude, row) in falling order; rows count inside the unit in a receipt and over the whole
    store in a summary. `norm_bins` counts sampled rows by floor(32 x log2(norm)); rows of norm zero are in
    `zero_rows` only. `mean` and `variance` are over the `sampled_values` values of sampled, finite rows.
    """

    rows: int = 0
    zero_rows: int = 0
    nonfinite_rows: int = 0
    first_nonfinite_row: int | None = None
    max_abs: float = 0.0
    largest: tuple[tuple[float, int], ...] = ()
    sampled_rows: int = 0
    sampled_values: int = 0
    mean: float = 0.0
    variance: float = 0.0
    norm_bins: dict[int, int] = field(default_factory=dict)

    def norm_quantile(self, q: float) -> float:
        """Quantile `q` of the row norms, to the resolution of the histogram; NaN without samples."""
        total = sum(self.norm_bins.values())
        if not total:
            return math.nan
        seen = 0
        for bin_number in sorted(self.norm_bins):
            seen += self.norm_bins[bin_number]
            if seen >= q * total:
                return float(2 ** ((bin_number + 0.5) / BINS_PER_OCTAVE))
        raise AssertionError("a quantile lies within its histogram")

    def massive_rows(self, factor: float = 10.0) -> tuple[int, ...]:
        """Of the largest rows, those whose magnitude exceeds `factor` times the root mean square of the values."""
        scale = math.sqrt(self.variance + self.mean**2)
        return tuple(row for magnitude, row in self.largest if magnitude > factor * scale > 0)

    def shifted(self, rows: int) -> LocationStatistics:
        """The same with every row number raised by `rows`."""
        first = None if self.first_nonfinite_row is None else self.first_nonfinite_row + rows
        largest = tuple((magnitude, row + rows) for magnitude, row in self.largest)
        return LocationStatistics(**{**self._fields(), "first_nonfinite_row": first, "largest": largest})

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; `from_json` reverses it."""
        bins = {str(number): count for number, count in sorted(self.norm_bins.items())}
        return {**self._fields(), "largest": [list(item) for item in self.largest], "norm_bins": bins}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> LocationStatistics:
        """What `to_json` wrote."""
        bins = {int(number): count for number, count in content["norm_bins"].items()}
        largest = tuple((float(magnitude), int(row)) for magnitude, row in content["largest"])
        return cls(**{**content, "largest": largest, "norm_bins": bins})

    def _fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def merge_statistics(parts: Iterable[LocationStatistics]) -> LocationStatistics:
    """Statistics of the union of disjoint sets of rows."""
    parts = list(parts)
    values = sum(part.sampled_values for part in parts)
    mean = sum(part.mean * part.sampled_values for part in parts) / values if values else 0.0
    square = sum((part.variance + (part.mean - mean) ** 2) * part.sampled_values for part in parts)
    bins: Counter[int] = Counter()
    for part in parts:
        bins.update(part.norm_bins)
    first = [part.first_nonfinite_row for part in parts if part.first_nonfinite_row is not None]
    largest = sorted((item for part in parts for item in part.largest), key=lambda item: (-item[0], item[1]))
    return LocationStatistics(
        rows=sum(part.rows for part in parts),
        zero_rows=sum(part.zero_rows for part in parts),
        nonfinite_rows=sum(part.nonfinite_rows for part in parts),
        first_nonfinite_row=min(first, default=None),
        max_abs=max((part.max_abs for part in parts), default=0.0),
        largest=tuple(largest[:LARGEST_ROWS]),
        sampled_rows=sum(part.sampled_rows for part in parts),
        sampled_values=values,
        mean=mean,
        variance=square / values if values else 0.0,
        norm_bins=dict(bins),
    )


class RowStatistics:
    """Gathers the statistics of one location of one unit; thread-safe.

    Magnitudes are kept a row, as the bits of the largest absolute value, so a row taken back leaves no trace.
    """

    def __init__(self, *, rows: int, dtype: str) -> None:
        self._native = np.dtype("<f2" if dtype == "float16" else "<f4")
        self._bits = np.dtype("<u4" if dtype == "float32" else "<u2")
        self._signed = np.dtype("<i4" if dtype == "float32" else "<i2")
        self._is_bfloat16 = dtype == "bfloat16"
        self._sign = self._bits.type(0x7FFFFFFF if dtype == "float32" else 0x7FFF)
        self._infinity = _INFINITY_BITS[dtype]
        # Largest bits of a row, as unsigned and as signed integers.
        self._unsigned_max = np.zeros(rows, self._bits)
        self._signed_max = np.zeros(rows, self._signed)
        self._samples: dict[int, tuple[int, float, float]] = {}
        self._lock = threading.Lock()

    def add(self, row: int, data: np.ndarray[Any, Any]) -> None:
        """Take `data` (uint8 [n, row_bytes]) as rows `row ..`."""
        n = len(data)
        np.maximum.reduce(data.view(self._bits), axis=1, out=self._unsigned_max[row : row + n])
        np.maximum.reduce(data.view(self._signed), axis=1, out=self._signed_max[row : row + n])
        for at in range(row + -row % SAMPLE_STRIDE, row + n, SAMPLE_STRIDE):
            values = self._floats(data[at - row].view(self._bits))
            square = float(np.dot(values, values))
            if not math.isfinite(square):  # too large for float32, or the row itself is not finite
                values = values.astype(np.float64)
                square = float(np.dot(values, values))
            if not math.isfinite(square):
                continue
            with self._lock:
                self._samples[at] = (len(values), float(values.sum()), square)

    def taker(self, row: int) -> Callable[[int, np.ndarray[Any, Any]], None]:
        """A function (offset, data) that adds `data` at row `row + offset`."""
        return lambda offset, data: self.add(row + offset, data)

    def clear(self, row: int, n: int) -> None:
        """Forget rows `row .. row+n-1`."""
        self._unsigned_max[row : row + n] = 0
        self._signed_max[row : row + n] = 0
        with self._lock:
            for at in range(row + -row % SAMPLE_STRIDE, row + n, SAMPLE_STRIDE):
                self._samples.pop(at, None)

    def finish(self, mask: np.ndarray[Any, Any]) -> LocationStatistics:
        """The statistics of the rows that `mask` (bool [rows]) names."""
        # As unsigned integers negative values are above all others, as signed ones below: two maxima, no copy.
        negative = np.where(self._unsigned_max > self._sign, self._unsigned_max & self._sign, 0)
        magnitude = np.maximum(negative, np.maximum(self._signed_max, 0).astype(self._bits))
        nonfinite = magnitude >= self._infinity
        finite = np.where(nonfinite, 0, magnitude).astype(self._bits)
        count = min(LARGEST_ROWS, len(finite))
        top = np.argpartition(finite, len(finite) - count)[len(finite) - count :]
        rows = sorted(top.tolist(), key=lambda row: (-int(finite[row]), row))
        largest = tuple((float(self._floats(finite[row : row + 1])[0]), row) for row in rows if finite[row])
        samples = [item for row, item in sorted(self._samples.items()) if not nonfinite[row]]
        values = sum(item[0] for item in samples)
        mean = math.fsum(item[1] for item in samples) / values if values else 0.0
        square = math.fsum(item[2] for item in samples) / values if values else 0.0
        norms = [item[2] for item in samples if item[2] > 0]
        return LocationStatistics(
            rows=int(np.count_nonzero(mask)),
            zero_rows=int(np.count_nonzero(mask & (magnitude == 0))),
            nonfinite_rows=int(np.count_nonzero(nonfinite)),
            first_nonfinite_row=int(np.argmax(nonfinite)) if nonfinite.any() else None,
            max_abs=largest[0][0] if largest else 0.0,
            largest=largest,
            sampled_rows=len(samples),
            sampled_values=values,
            mean=mean,
            variance=max(0.0, square - mean**2),
            norm_bins=dict(Counter(math.floor(BINS_PER_OCTAVE * math.log2(norm) / 2) for norm in norms)),
        )

    def _floats(self, bits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        if self._is_bfloat16:
            return (bits.astype(np.uint32) << 16).view(np.float32)
        return bits.view(self._native).astype(np.float32)
