"""Work that is done to its end, whoever goes away meanwhile."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Coroutine
from typing import Any, TypeVar

import structlog

from fedone_sdk.errors import FedOneError

__all__ = ["wait_pending", "run_shielded"]

T = TypeVar("T")

_log = structlog.get_logger(__name__)

_UNDER_WAY: dict[asyncio.Task[Any], object] = {}
"""Each task, and whose it is. The event loop itself does not hold on to tasks."""


async def run_shielded(work: Coroutine[Any, Any, T], *, of: object) -> T:
    """Awaits `work`; a caller that goes away must not leave it half done.

    Args:
        work: What is to be done.
        of: Whose it is: the store that it changes.
    """
    if asyncio.current_task() in _UNDER_WAY:
        return await work  # What this is a part of is shielded already.
    task = asyncio.create_task(work)
    _UNDER_WAY[task] = of
    task.add_done_callback(_UNDER_WAY.pop)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(_hear)
        raise


async def wait_pending(of: object) -> None:
    """Returns when all such work of this owner has ended, whoever has begun it."""
    here = asyncio.current_task()
    while rest := [task for task, owner in _UNDER_WAY.items() if owner is of and task is not here]:
        await asyncio.wait(rest)


def _hear(task: asyncio.Task[Any]) -> None:
    """Takes note of how work ended that nobody waits for any more."""
    error = None if task.cancelled() else task.exception()
    # A Ctrl-C amid the work is an end that was asked for: asyncio itself tells the caller of it.
    if isinstance(error, Exception) and not isinstance(error, FedOneError):
        # Formatted here, as local variables are none of the log's business.
        lines = traceback.format_exception(error)
        _log.error("work that nobody waits for failed", traceback="".join(lines))
