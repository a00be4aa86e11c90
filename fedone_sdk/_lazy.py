"""Packages whose modules are loaded when one of their names is first used."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


def lazy(
    package: dict[str, Any], modules: str
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return a package's ``__getattr__`` and ``__dir__`` (PEP 562), for the names in ``__all__``.

    A name is looked up in the modules in their order, and those after it are not loaded: the first
    ones are those that a small process needs.
    """

    def load(name: str) -> object:
        if name in package["__all__"]:
            for module in modules.split():
                home = import_module(f"{package['__name__']}.{module}")
                if hasattr(home, name):
                    return package.setdefault(name, getattr(home, name))
        raise AttributeError(f"module {package['__name__']!r} has no attribute {name!r}")

    return load, lambda: sorted({*package, *package["__all__"]})
