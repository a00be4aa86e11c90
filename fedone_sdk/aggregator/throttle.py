"""Refuses callers that ask more often than they may."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from fedone_sdk.backends.wrappers.rate_limit import Meter
from fedone_sdk.errors import ProblemError

__all__ = ["Bucket", "Throttle"]


class Throttle:
    """Counts requests, and refuses those above a limit instead of letting them wait.

    What is refused counts nowhere. Whoever has not asked for a while is forgotten.
    """

    def __init__(self) -> None:
        # The least recently admitted one first, each with the time when it may be forgotten.
        self._meters: OrderedDict[tuple[Hashable, float], tuple[float, Meter]] = OrderedDict()

    def admit(self, now: float, *limits: tuple[Hashable, float | None]) -> None:
        """Counts one request against all limits, or against none.

        Args:
            now: Seconds.
            limits: Who asks, and how often that may happen a minute; None is no limit.

        Raises:
            ProblemError: ``rate_limited``, with how long to wait.
        """
        while self._meters and next(iter(self._meters.values()))[0] <= now:
            self._meters.popitem(last=False)
        meters = [
            (who, limit, self._meters.get((who, limit), (0.0, Meter(limit)))[1])
            for who, limit in limits
            if limit is not None
        ]
        for _, limit, meter in meters:
            ready = meter.ready_at(1, now)
            if ready > now:
                raise ProblemError(
                    "rate_limited",
                    f"more than {limit:g} requests a minute",
                    retry_after_s=ready - now,
                )
        for who, limit, meter in meters:
            meter.send(1, now)
            self._meters[who, limit] = (now + max(60.0, 60.0 / limit), meter)
            self._meters.move_to_end((who, limit))


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
