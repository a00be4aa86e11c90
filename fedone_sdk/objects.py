"""Objects of a user's own that a local file names: by entry point, or as ``module:object``.

To load one runs its module's code. So only what a file of this machine names is loaded, and nothing
that came in a message.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from fedone_sdk.errors import SpecError

__all__ = ["load_object"]


def load_object(key: str, name: str, folder: str | Path = ".", *, group: str | None = None) -> Any:
    """The callable of a name.

    Args:
        key: Of the file, for errors.
        name: ``package.module:object``, or the name of an entry point.
        folder: Where a module is looked for too, after everything that is installed: the folder of
            the file. It stays on the path, for what the object imports later.
        group: Of the entry points; None takes no name of one.

    Raises:
        SpecError: It cannot be imported, or is no callable.
    """
    try:
        if ":" in name:
            place = str(Path(folder).resolve())
            if place not in sys.path:
                sys.path.append(place)
            module, _, path = name.partition(":")
            found: Any = import_module(module)
            for part in path.split("."):
                found = getattr(found, part)
        else:
            found = _entry_point(key, name, group)
    except SpecError:
        raise
    except Exception as exc:  # A module of the user's can raise anything.
        raise SpecError(f"{key}: cannot import {name!r}: {type(exc).__name__}: {exc}") from exc
    if not callable(found):
        raise SpecError(f"{key}: {name!r} is not a function or class")
    return found


def _entry_point(key: str, name: str, group: str | None) -> Any:
    points = {} if group is None else {point.name: point for point in entry_points(group=group)}
    if name not in points:
        known = f" or one of {', '.join(sorted(points))}" if points else ""
        raise SpecError(f"{key}: {name!r} must be package.module:object{known}")
    return points[name].load()
