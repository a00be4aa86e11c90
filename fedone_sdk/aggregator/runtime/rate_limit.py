"""Refuses callers that ask more often than they may."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from fedone_sdk.errors import ProblemError

__all__ = ["Bucket"]


class Bucket:
    """One limit for very many callers: two numbers each, however much they may ask.

    A caller may ask a minute's worth at once, and gets it back evenly (a token bucket).

    Args:
        per_minute: How often each caller may ask; None is no limit.
        capacity: How many callers are remembered; the one that asked least lately is forgotten.
    """

    def __init__(self, per_minute: float | None, *, capacity: int = 65_536) -> None:
        self._per_minute = per_minute
        self._capacity = capacity
        # When each caller's bucket is full again: what is missing follows from it.
        self._full_at: OrderedDict[Hashable, float] = OrderedDict()

    def wait_s(self, who: Hashable, now: float) -> float:
        """How long a caller must wait before it may ask, seconds."""
        if self._per_minute is None:
            return 0.0
        share = 60.0 / self._per_minute
        return max(self._full_at.get(who, now) + share - now - max(60.0, share), 0.0)

    def check(self, who: Hashable, now: float) -> None:
        """Refuses a caller that must wait.

        Raises:
            ProblemError: ``rate_limited``, with how long to wait.
        """
        wait_s = self.wait_s(who, now)
        if wait_s > 0:
            raise ProblemError(
                "rate_limited",
                f"more than {self._per_minute:g} requests a minute",
                retry_after_s=wait_s,
            )

    def take(self, who: Hashable, now: float) -> None:
        """Counts that a caller asks."""
        if self._per_minute is None:
            return
        self._full_at[who] = max(self._full_at.get(who, now), now) + 60.0 / self._per_minute
        self._full_at.move_to_end(who)
        while self._full_at and (
            len(self._full_at) > self._capacity or next(iter(self._full_at.values())) <= now
        ):
            self._full_at.popitem(last=False)
