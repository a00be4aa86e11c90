"""Work that is done to its end, whoever goes away meanwhile."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Coroutine
from typing import Any, TypeVar

import structlog

from fedone_sdk.errors import FedOneError

__all__ = ["none_under_way", "to_the_end"]

T = TypeVar("T")

_log = structlog.get_logger(__name__)

_UNDER_WAY: set[asyncio.Task[Any]] = set()
# The event loop itself does not hold on to tasks.


async def to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Awaits `work`; a caller that goes away must not leave it half done."""
    task = asyncio.create_task(work)
    _UNDER_WAY.add(task)
    task.add_done_callback(_UNDER_WAY.discard)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(_hear)
        raise


async def none_under_way() -> None:
    """Returns when all such work of this event loop has ended, whoever has begun it."""
    here = {asyncio.current_task()}
    while (
        rest := {task for task in _UNDER_WAY if task.get_loop() is asyncio.get_running_loop()}
        - here
    ):
        await asyncio.wait(rest)


def _hear(task: asyncio.Task[Any]) -> None:
    """Takes note of how work ended that nobody waits for any more."""
    error = None if task.cancelled() else task.exception()
    # A Ctrl-C amid the work is an end that was asked for: asyncio itself tells the caller of it.
    if isinstance(error, Exception) and not isinstance(error, FedOneError):
        # Formatted here, as local variables are none of the log's business.
        lines = traceback.format_exception(error)
        _log.error("work that nobody waits for failed", traceback="".join(lines))
