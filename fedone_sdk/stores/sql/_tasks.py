"""Work that a cancelled caller must not leave half done."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def run_shielded(work: Coroutine[Any, Any, T]) -> T:
    """Awaits `work`, which goes on to its end when the caller is cancelled.

    A thread cannot be stopped: a store that is closed meanwhile would take its connection away.
    And of a statement that PostgreSQL is told to cancel, nobody knows whether it was done.
    """
    task = asyncio.create_task(work, name="store transaction")
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise
