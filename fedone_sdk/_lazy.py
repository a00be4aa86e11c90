"""Packages whose modules are loaded when one of their names is first used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy(
    package: dict[str, Any], modules: Mapping[str, str]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return a package's ``__getattr__`` and ``__dir__`` (PEP 562)."""
    homes = {name: module for module, names in modules.items() for name in names.split()}

    def load(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package['__name__']!r} has no attribute {name!r}")
        home = import_module(f"{package['__name__']}.{homes[name]}")
        return package.setdefault(name, getattr(home, name))

    return load, lambda: sorted({*package, *homes})
