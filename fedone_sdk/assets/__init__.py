"""Files that ship with the SDK: the embedded model and demo data."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

__all__ = ["path"]


def path(name: str) -> Path:
    """Where a shipped file or folder lies.

    Raises:
        FileNotFoundError: There is no such asset.
    """
    # The package is installed as plain files (never run from a zip), so a real path exists.
    found = Path(str(resources.files(__name__))) / name
    if not found.exists():
        raise FileNotFoundError(f"the SDK ships no asset {name!r}")
    return found
