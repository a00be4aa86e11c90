"""Waits between attempts: within a call, and between turns."""

from __future__ import annotations

import random

from fedone_sdk.errors import ProblemError, TransportError

MAX_WAIT_S = 3600.0
"""The longest ``Retry-After`` that is honoured, seconds."""

MAX_CALL_WAIT_S = 3.0
"""The longest ``Retry-After`` that a call waits for, seconds; a longer one ends the turn. A mobile
system gives an app that it wakes only minutes."""


class Backoff:
    """Waits that grow with consecutive failures: exponential, with full jitter and a cap.

    Full jitter spreads devices that lost the same server at the same moment evenly over the wait
    (Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015).

    Args:
        first_s: Upper bound of the first wait, seconds.
        max_s: Upper bound of every wait, seconds.
    """

    def __init__(self, first_s: float = 1.0, max_s: float = 300.0) -> None:
        self._first_s = first_s
        self._max_s = max_s
        self._failures = 0

    def reset(self) -> None:
        """Start again with the first wait, after a success."""
        self._failures = 0

    def next_s(self, asked_s: float | None = None) -> float:
        """Return the wait after one more failure, seconds.

        Args:
            asked_s: The server's ``Retry-After``; honoured up to `MAX_WAIT_S`, and added.
        """
        bound = min(self._max_s, self._first_s * 2.0 ** min(self._failures, 32))
        self._failures += 1
        return min(asked_s or 0.0, MAX_WAIT_S) + random.uniform(0.0, bound)


def retry_after_s(failure: BaseException | None) -> float:
    """Return a failure's ``Retry-After``, seconds; 0 if it has none."""
    asked = failure.retry_after_s if isinstance(failure, (ProblemError, TransportError)) else None
    return asked or 0.0
