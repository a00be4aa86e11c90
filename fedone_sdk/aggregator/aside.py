"""Work that takes long, away from the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

__all__ = ["aside"]

P = ParamSpec("P")
T = TypeVar("T")

_SMALL = 32 * 1024
"""What is done at once, bytes: a visit to a thread costs about as much."""


async def aside(size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Does `work` in a thread, unless it is on less than 32 KiB.

    Args:
        size: What it is on, bytes.
        work: A function that shares nothing with others.
        args: Its arguments.
        kwargs: Those with a name.
    """
    if size < _SMALL:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)
