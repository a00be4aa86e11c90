"""Shielded tasks: they run to completion even if their caller is cancelled."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Coroutine
from typing import Any, TypeVar

import structlog

from fedone_sdk.errors import FedOneError

T = TypeVar("T")

_log = structlog.get_logger(__name__)

_PENDING: dict[asyncio.Task[Any], object] = {}
"""Task -> owner. The event loop only keeps weak references to tasks."""


async def run_shielded(work: Coroutine[Any, Any, T], *, of: object) -> T:
    """Await `work`; if the caller is cancelled, `work` still runs to completion.

    Args:
        work: The coroutine.
        of: Its owner: the store that it changes.
    """
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
    """Log the failure of a task whose caller was cancelled."""
    error = None if task.cancelled() else task.exception()
    # asyncio itself reports a KeyboardInterrupt to the caller.
    if isinstance(error, Exception) and not isinstance(error, FedOneError):
        # Formatted here: log renderers may print local variables.
        lines = traceback.format_exception(error)
        _log.error("background work failed", traceback="".join(lines))
