"""Guard: the three packages must come from one place, in the driver and in every process it starts.

Their top-level names are short; another distribution, or a folder of the working directory, may shadow one of them.
"""

from __future__ import annotations

from pathlib import Path

import actors
import storage


class ForeignPackage(ImportError):
    """A package of ours was imported from elsewhere."""


def package_origin() -> str:
    """The folder that holds `actors` and `storage`.

    Raises:
        ForeignPackage: they come from different folders.
    """
    origins = {package.__name__: Path(str(package.__file__)).resolve().parent.parent for package in (actors, storage)}
    if len(set(origins.values())) > 1:
        places = ", ".join(f"{name} from {place}" for name, place in origins.items())
        raise ForeignPackage(
            f"{places}: another installed package or a folder on PYTHONPATH shadows one of them; use an environment of "
            "its own for harvest-activations"
        )
    return str(origins["actors"])


def check_origin(expected: str) -> None:
    """Compare with the driver's origin.

    Raises:
        ForeignPackage: this process imported the packages from elsewhere.
    """
    found = package_origin()
    if found != expected:
        raise ForeignPackage(f"the driver uses the packages in {expected}, this process those in {found}")
