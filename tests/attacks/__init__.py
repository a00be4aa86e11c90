"""Attacks by hostile devices, servers, files, providers and people, against real components.

Each module of this package lists its attacks in `ATTACKS`. `python -m tests.attacks` runs all and
prints a table; `test_attacks.py` runs each as a test.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib import import_module
from inspect import isawaitable
from pathlib import Path
from pkgutil import iter_modules


class Succeeded(AssertionError):
    """The attack reaches its goal; the message says what it gets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """An attack.

    Attributes:
        name: Who attacks and how, in a few words.
        before: What it reached before its defence.
        run: Attacks, with an empty folder of its own; returns what it reaches now, in a few words.
            Any `AssertionError`, such as `Succeeded`, means that it reaches its goal.
    """

    name: str
    before: str
    run: Callable[[Path], str | Awaitable[str]]

    def __call__(self, folder: Path) -> str:
        """Run the attack, and return what it reaches."""
        found = self.run(folder)
        return asyncio.run(_wait(found)) if isawaitable(found) else found


async def _wait(found: Awaitable[str]) -> str:
    async with asyncio.timeout(120):
        return await found


def all_attacks() -> list[Attack]:
    """Return the attacks of all modules, in the order of the modules' names."""
    names = sorted(module.name for module in iter_modules(__path__))
    modules = [name for name in names if name != "__main__" and not name.startswith("test_")]
    return [attack for name in modules for attack in import_module(f"{__name__}.{name}").ATTACKS]
