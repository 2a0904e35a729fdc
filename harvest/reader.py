"""`harvest.open(run)`: a run's rows as torch tensors.

Tensors share memory with the buffers that were read: bfloat16 takes no conversion and no copy.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import torch

import storage.bfloat16  # noqa: F401  zarr.open in the same process then knows the type, installed or not
from storage.reader import Prompt, StoreReader

if TYPE_CHECKING:
    from harvest.loader import RowLoader


def to_torch(values: np.ndarray[Any, Any]) -> torch.Tensor:
    """`values` as a tensor over the same memory; also where the dtype is `ml_dtypes.bfloat16`."""
    if values.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)


class Run(StoreReader):
    """A run opened for reading; see `StoreReader`. Rows come as torch tensors, in the stored dtype."""

    def rows(self, location: str, rows: slice | range | int) -> torch.Tensor:
        """Rows of a location, [n, width]; `rows` counts over the whole store and holes read as zero."""
        return to_torch(self.array(self.location(location).array, rows))

    def batches(self, locations: str | Iterable[str], batch_size: int, **options: Any) -> RowLoader:
        """Shuffled batches of rows for training: a `harvest.loader.RowLoader`, which says what `options` are."""
        from harvest.loader import RowLoader

        return RowLoader(self, locations, batch_size=batch_size, **options)

    def prompt(self, invoke: int) -> Prompt:
        """One invoke: token ids and positions as numpy int32 [n], and `rows` as tensors [n, width] by location name."""
        prompt = super().prompt(invoke)
        prompt.rows.update({name: to_torch(values) for name, values in prompt.rows.items()})
        return prompt


def open_run(run: Path | str) -> Run:
    """Open the run at `run`, finished or not; `StorageError` says what is wrong with it otherwise."""
    return Run(run)


open = open_run  # `harvest.open`
