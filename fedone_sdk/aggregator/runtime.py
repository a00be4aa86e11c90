"""Helpers for asyncio: shielded tasks, threads for slow work, rate limits."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import os
import traceback
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Hashable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

import structlog

from fedone_sdk.errors import FedOneError, ProblemError

P = ParamSpec("P")
T = TypeVar("T")

_log = structlog.get_logger(__name__)

_PENDING: dict[asyncio.Task[Any], object] = {}
"""Task -> owner. The event loop only keeps weak references to tasks."""
_SMALL = 32 * 1024
"""Size up to which work runs inline, bytes: a switch of threads costs about as much."""

# Few: each thread that runs Python code can delay the event loop by a switch interval of 5 ms.
_THREADS = ThreadPoolExecutor(max(1, min(4, (os.cpu_count() or 2) - 1)), "fedone-worker")


async def run_shielded(work: Coroutine[Any, Any, T], *, of: object) -> T:
    """Await `work`, which changes `of`; it runs to completion even if the caller is cancelled."""
    if asyncio.current_task() in _PENDING:
        return await work  # The caller is shielded.
    task = asyncio.create_task(work)
    _PENDING[task] = of
    task.add_done_callback(_PENDING.pop)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(_log_failure)
        raise


async def wait_pending(of: object) -> None:
    """Wait until all shielded tasks of an owner have ended."""
    here = asyncio.current_task()
    while rest := [task for task, owner in _PENDING.items() if owner is of and task is not here]:
        await asyncio.wait(rest)


def _log_failure(task: asyncio.Task[Any]) -> None:
    error = None if task.cancelled() else task.exception()
    # asyncio itself reports a KeyboardInterrupt to the caller.
    if isinstance(error, Exception) and not isinstance(error, FedOneError):
        # Formatted here: log renderers may print local variables.
        lines = traceback.format_exception(error)
        _log.error("background work failed", traceback="".join(lines))


async def in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `work` in a thread; it must be thread-safe and not wait for `in_thread` itself."""
    context = contextvars.copy_context()
    call = functools.partial(context.run, work, *args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(_THREADS, call)


async def in_thread_if_large(
    size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Call `work` in a thread if its input has at least 32 KiB, else inline; `size` is in bytes."""
    if size < _SMALL:
        return work(*args, **kwargs)
    return await in_thread(work, *args, **kwargs)


class Bucket:
    """Token buckets with the same limit for many callers.

    Each bucket holds one minute's worth of requests and refills evenly.

    Args:
        per_minute: Requests per minute and caller; None is unlimited.
        capacity: Maximal number of buckets; the least recently used one is dropped.
    """

    def __init__(self, per_minute: float | None, *, capacity: int = 65_536) -> None:
        self._per_minute = per_minute
        self._capacity = capacity
        # Caller -> time at which its bucket is full again, which determines its content.
        self._full_at: OrderedDict[Hashable, float] = OrderedDict()

    def wait_s(self, caller: Hashable, now: float) -> float:
        """Return how long a caller must wait before its next request, seconds."""
        if self._per_minute is None:
            return 0.0
        share = 60.0 / self._per_minute
        return max(self._full_at.get(caller, now) + share - now - max(60.0, share), 0.0)

    def admit(self, caller: Hashable, now: float, count: int = 1) -> None:
        """Count requests, or refuse a caller whose bucket is empty (``rate_limited``)."""
        wait_s = self.wait_s(caller, now)
        if wait_s > 0:
            raise ProblemError(
                "rate_limited",
                f"more than {self._per_minute:g} requests a minute",
                retry_after_s=wait_s,
            )
        self.take(caller, now, count)

    def take(self, caller: Hashable, now: float, count: int = 1) -> None:
        """Count requests of a caller; the next ones wait until the bucket has refilled."""
        if self._per_minute is None:
            return
        taken = count * 60.0 / self._per_minute
        self._full_at[caller] = max(self._full_at.get(caller, now), now) + taken
        self._full_at.move_to_end(caller)
        while self._full_at and (
            len(self._full_at) > self._capacity or next(iter(self._full_at.values())) <= now
        ):
            self._full_at.popitem(last=False)
