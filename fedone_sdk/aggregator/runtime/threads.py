"""Threads for work that would block the event loop."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_SMALL = 32 * 1024
"""Size up to which work runs inline, bytes: a switch of threads costs about as much."""

# Few: each thread that runs Python code can delay the event loop by a switch interval of 5 ms.
_THREADS = ThreadPoolExecutor(max(1, min(4, (os.cpu_count() or 2) - 1)), "fedone-worker")


async def in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `work` in a thread.

    Args:
        work: A thread-safe function that does not itself wait for `in_thread`.
        args: Positional arguments.
        kwargs: Keyword arguments.
    """
    context = contextvars.copy_context()
    call = functools.partial(context.run, work, *args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(_THREADS, call)


async def in_thread_if_large(
    size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Call `work` in a thread if its input has at least 32 KiB, else inline.

    Args:
        size: Size of the input, bytes.
        work: A function as for `in_thread`.
        args: Positional arguments.
        kwargs: Keyword arguments.
    """
    if size < _SMALL:
        return work(*args, **kwargs)
    return await in_thread(work, *args, **kwargs)
