"""Attacks by hostile devices, servers, files, providers and people, against real components.

`python -m tests.attacks` runs all attacks of this package and prints a table; `test_attacks.py`
runs each as a test.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from importlib import import_module
from inspect import isawaitable
from pathlib import Path
from pkgutil import iter_modules

Attack = Callable[[Path], str | Awaitable[str]]
"""Attacks, with an empty folder of its own; returns what it reaches, in a few words.

Any `AssertionError`, such as `Succeeded`, means that it reaches its goal."""

_attacks: dict[str, tuple[str, Attack]] = {}


class Succeeded(AssertionError):
    """The attack reaches its goal; the message says what it gets."""


def attack(name: str, *, before: str) -> Callable[[Attack], Attack]:
    """Add an attack.

    Args:
        name: Who attacks and how.
        before: What it reaches without the defence.
    """

    def add(run: Attack) -> Attack:
        _attacks[name] = before, run
        return run

    return add


def before(name: str) -> str:
    """Return what an attack reaches without the defence."""
    return _attacks[name][0]


def run_attack(name: str, folder: Path) -> str:
    """Run an attack, and return what it reaches."""
    found = _attacks[name][1](folder)
    return asyncio.run(_wait(found)) if isawaitable(found) else found


async def _wait(found: Awaitable[str]) -> str:
    async with asyncio.timeout(120):
        return await found


def all_attacks() -> list[str]:
    """Return the names of the attacks, in the order of the modules' names."""
    for module in sorted(module.name for module in iter_modules(__path__)):
        if module != "__main__" and not module.startswith("test_"):
            import_module(f"{__name__}.{module}")
    return list(_attacks)
