"""Work that takes long, away from the event loop."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

__all__ = ["in_thread", "in_thread_if_large"]

P = ParamSpec("P")
T = TypeVar("T")

_SMALL = 32 * 1024
"""What is done at once, bytes: a visit to a thread costs about as much."""

# Few: each thread that computes in Python may keep the event loop from the interpreter for a switch
# interval, 5 ms, whenever the loop has something to do.
_THREADS = ThreadPoolExecutor(max(1, min(4, (os.cpu_count() or 2) - 1)), "fedone-worker")


async def in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Does `work` in a thread.

    Args:
        work: A function that shares nothing with others; it must not wait for more such work.
        args: Its arguments.
        kwargs: Those with a name.
    """
    context = contextvars.copy_context()
    call = functools.partial(context.run, work, *args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(_THREADS, call)


async def in_thread_if_large(
    size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Does `work` in a thread, unless it is on less than 32 KiB.

    Args:
        size: What it is on, bytes.
        work: As of `in_thread`.
        args: Its arguments.
        kwargs: Those with a name.
    """
    if size < _SMALL:
        return work(*args, **kwargs)
    return await in_thread(work, *args, **kwargs)
