"""A log, page by page: however long it is, a reader holds little of it."""

from __future__ import annotations

from collections.abc import AsyncIterator

from fedone_sdk.stores.base import LogEntry, Store

__all__ = ["log_pages"]

_PAGE_BYTES = 1 << 20
"""What a page holds, about: lines differ in size."""
_FIRST, _MOST = 16, 1024
"""Lines of the first page, and the most of any."""


async def log_pages(
    store: Store, run_id: str, kind: str | None = None, after: int = -1
) -> AsyncIterator[list[LogEntry]]:
    """A run's log in the order it was written, in pages of about 1 MiB.

    Entries of one commit are never in two pages. What is appended meanwhile may be in the last.

    Args:
        store: Where the run is.
        run_id: The run.
        kind: Only entries of this kind.
        after: Only entries of later commits than the one that made this version.

    Yields:
        Pages; none of them is empty.
    """
    limit = _FIRST
    while page := await store.log(run_id, kind, after, limit):
        yield page
        after = page[-1].version
        mean = max(sum(len(entry.body) for entry in page) // len(page), 1)
        limit = min(max(_PAGE_BYTES // mean, 1), _MOST)
