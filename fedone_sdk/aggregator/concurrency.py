"""Tasks that outlive their caller, and threads for slow work."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import os
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

import structlog

from fedone_sdk.errors import FedOneError

P = ParamSpec("P")
T = TypeVar("T")

_log = structlog.get_logger(__name__)

_PENDING: dict[asyncio.Task[Any], object] = {}
"""Owner of each task. Keeps the tasks alive: the event loop only has weak references to tasks."""
_SMALL_BYTES = 32 * 1024
"""Work on a smaller input takes less time than the switch to a thread."""

# Few threads, because each thread that runs Python code can delay the event loop by up to 5 ms.
_THREADS = ThreadPoolExecutor(max(1, min(4, (os.cpu_count() or 2) - 1)), "fedone-worker")


async def run_to_end(work: Coroutine[Any, Any, T], *, owner: object) -> T:
    """Await `work`, which continues if the caller is cancelled; `wait_pending(owner)` awaits it."""
    if asyncio.current_task() in _PENDING:
        return await work  # The current task already outlives its caller.
    task = asyncio.create_task(work)
    _PENDING[task] = owner
    task.add_done_callback(_PENDING.pop)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(_log_failure)
        raise


async def wait_pending(owner: object) -> None:
    """Wait until all calls of `run_to_end` for an owner have ended."""
    caller = asyncio.current_task()
    while tasks := [t for t, whose in _PENDING.items() if whose is owner and t is not caller]:
        await asyncio.wait(tasks)


def _log_failure(task: asyncio.Task[Any]) -> None:
    error = None if task.cancelled() else task.exception()
    # A KeyboardInterrupt is not logged here: asyncio raises it in the main program.
    if isinstance(error, Exception) and not isinstance(error, FedOneError):
        # Formatted here: some log renderers print local variables, which may contain private texts.
        lines = traceback.format_exception(error)
        _log.error("background work failed", traceback="".join(lines))


async def in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `work` in a thread. It must be thread-safe, and must not wait for other such calls."""
    context = contextvars.copy_context()
    call = functools.partial(context.run, work, *args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(_THREADS, call)


async def in_thread_if_large(
    num_bytes: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Call `work` in a thread if its input has at least 32 KiB, otherwise in this thread."""
    if num_bytes < _SMALL_BYTES:
        return work(*args, **kwargs)
    return await in_thread(work, *args, **kwargs)
