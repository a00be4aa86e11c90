"""User objects named in a local file: by entry point, or as ``module:object``.

Loading one executes its module. Only names from local files are loaded, never from messages.
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
    """Return the callable of a name.

    Args:
        key: Key in the file, for errors.
        name: ``package.module:object``, or the name of an entry point.
        folder: Folder of the file, searched for modules after installed packages. It stays on the
            path for later imports of the object.
        group: Group of the entry points; None allows no entry points.

    Raises:
        SpecError: The object cannot be imported or is not callable.
    """
    try:
        if ":" in name:
            place = str(Path(folder).resolve())
            if place not in sys.path:
                sys.path.append(place)
            module, _, path = name.partition(":")
            target: Any = import_module(module)
            for part in path.split("."):
                target = getattr(target, part)
        else:
            target = _entry_point(key, name, group)
    except SpecError:
        raise
    except Exception as exc:  # A user's module can raise any error.
        raise SpecError(f"{key}: cannot import {name!r}: {type(exc).__name__}: {exc}") from exc
    if not callable(target):
        raise SpecError(f"{key}: {name!r} is not a function or class")
    return target


def _entry_point(key: str, name: str, group: str | None) -> Any:
    points = {} if group is None else {point.name: point for point in entry_points(group=group)}
    if name not in points:
        known = f" or one of {', '.join(sorted(points))}" if points else ""
        raise SpecError(f"{key}: {name!r} must be package.module:object{known}")
    return points[name].load()
