"""Brings the bfloat16 data type into any process that opens a Zarr store with zarr 3.1.

zarr finds data types by the entry point group `zarr.data_type`, but version 3.1 does not look there when it reads
metadata. It does load the group `zarr.buffer` before it reads anything, so an entry of ours there names this module:
importing it registers the data type, and the class it hands over is zarr's own default, under its own name.
"""

from zarr.core.buffer.cpu import Buffer

import storage.bfloat16  # noqa: F401  registers the data type

__all__ = ["Buffer"]
