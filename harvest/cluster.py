"""Ray, as a run needs it: join the cluster that `RAY_ADDRESS` names, or start one on this machine and end it after."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from harvest.errors import RunError

# Must be there before Ray is imported anywhere: workers must be this very interpreter, not one made anew by uv.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
# A cluster of one run on one machine needs no token, and would write one into the user's home.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
# A killed engine's ranks must not outlive it.
os.environ.setdefault("RAY_process_group_cleanup_enabled", "1")


@contextmanager
def connected() -> Iterator[None]:
    """Ray for the time of a run; a Ray that this process uses already is left alone.

    Raises:
        RunError: `RAY_ADDRESS` names a cluster that does not answer.
    """
    import ray

    if ray.is_initialized():
        yield
        return
    address = os.environ.get("RAY_ADDRESS")
    if address:
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise RunError(
                f"no Ray cluster can be joined at RAY_ADDRESS = {address}: {error}. Start it, or unset RAY_ADDRESS for "
                "one on this machine"
            ) from error
    else:
        ray.init(
            address="local",
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.WARNING,
            # Rows never pass through the object store.
            object_store_memory=100 * 1024**2,
        )
    try:
        yield
    finally:
        ray.shutdown()
