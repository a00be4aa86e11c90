"""Imports on first use, and imports of functions that configuration files name.

`load_object` executes the module that it imports. It is therefore called only with names from local
files, and never with names that another machine has sent.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

from fedone_sdk.errors import SpecError

__all__ = ["load_object"]


def lazy(
    package: dict[str, Any], modules: str
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return a package's ``__getattr__`` and ``__dir__`` (PEP 562), for the names in ``__all__``.

    `modules` are loaded in order until one of them has the name. The modules that a small process
    needs should therefore come first.
    """

    def load(name: str) -> object:
        if name in package["__all__"]:
            for module in modules.split():
                home = import_module(f"{package['__name__']}.{module}")
                if hasattr(home, name):
                    return package.setdefault(name, getattr(home, name))
        raise AttributeError(f"module {package['__name__']!r} has no attribute {name!r}")

    return load, lambda: sorted({*package, *package["__all__"]})


def load_object(
    key: str,
    name: str,
    folder: str | Path = ".",
    *,
    group: str | None = None,
    known: Iterable[str] = (),
) -> Any:
    """Return the callable that a name refers to.

    Args:
        key: The configuration key whose value is `name`, for errors.
        name: ``package.module:object``, or the name of an entry point.
        folder: Folder of the configuration file. It is searched after installed packages, and
            stays in ``sys.path``, because the object may import more modules later.
        group: Group of entry points; if None, `name` cannot be an entry point.
        known: Other names that the key may have, for errors.

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
            target = _entry_point(key, name, group, known)
    except SpecError:
        raise
    except Exception as exc:  # A user's module can raise any error.
        raise SpecError(f"{key}: cannot import {name!r}: {type(exc).__name__}: {exc}") from exc
    if not callable(target):
        raise SpecError(f"{key}: {name!r} is not a function or class")
    return target


def _entry_point(key: str, name: str, group: str | None, known: Iterable[str]) -> Any:
    from importlib.metadata import entry_points  # Slow to import.

    points = {} if group is None else {point.name: point for point in entry_points(group=group)}
    if name not in points:
        names = ", ".join([*known, *sorted(points)])
        raise SpecError(
            f"{key}: {name!r} must be package.module:object{names and f' or one of {names}'}"
        )
    return points[name].load()
