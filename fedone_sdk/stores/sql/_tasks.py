"""Shielded transactions."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def run_shielded(work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, which runs to completion even if the caller is cancelled.

    A thread cannot be cancelled, and closing the store would close its connection. The outcome of a
    cancelled PostgreSQL statement is unknown.
    """
    task = asyncio.create_task(work, name="store transaction")
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise
