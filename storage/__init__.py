"""Bytes on disk: the run folder, its Zarr store, commit, ledger and reader. No Ray, vLLM or torch."""
