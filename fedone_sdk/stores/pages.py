"""Reading of logs page by page, in constant memory."""

from __future__ import annotations

from collections.abc import AsyncIterator

from fedone_sdk.stores.base import LogEntry, Store

_PAGE_BYTES = 1 << 20
"""Approximate size of a page, bytes."""
_FIRST, _MOST = 16, 1024
"""Number of lines of the first page, and maximal number of any page."""


async def log_pages(
    store: Store, run_id: str, kind: str | None = None, after: int = -1
) -> AsyncIterator[list[LogEntry]]:
    """Yield a run's log in order, in pages of about 1 MiB.

    Entries of one commit are on the same page. The last page may include entries that are appended
    during the iteration.

    Args:
        store: The store of the run.
        run_id: The run.
        kind: Only entries of this kind.
        after: Only entries of versions after this one.

    Yields:
        Non-empty pages.
    """
    limit = _FIRST
    while page := await store.log(run_id, kind, after, limit):
        yield page
        after = page[-1].version
        mean = max(sum(len(entry.body) for entry in page) // len(page), 1)
        limit = min(max(_PAGE_BYTES // mean, 1), _MOST)
