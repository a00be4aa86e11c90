"""Rate limit per caller."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from fedone_sdk.errors import ProblemError


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

    def check(self, caller: Hashable, now: float) -> None:
        """Refuse a caller whose bucket is empty.

        Raises:
            ProblemError: ``rate_limited``, with the time to wait.
        """
        wait_s = self.wait_s(caller, now)
        if wait_s > 0:
            raise ProblemError(
                "rate_limited",
                f"more than {self._per_minute:g} requests a minute",
                retry_after_s=wait_s,
            )

    def take(self, caller: Hashable, now: float) -> None:
        """Count a request of a caller."""
        if self._per_minute is None:
            return
        self._full_at[caller] = max(self._full_at.get(caller, now), now) + 60.0 / self._per_minute
        self._full_at.move_to_end(caller)
        while self._full_at and (
            len(self._full_at) > self._capacity or next(iter(self._full_at.values())) <= now
        ):
            self._full_at.popitem(last=False)
