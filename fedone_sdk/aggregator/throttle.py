"""Refuses callers that ask more often than they may."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from fedone_sdk.backends.wrappers.rate_limit import Meter
from fedone_sdk.errors import ProblemError

__all__ = ["Throttle"]


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
