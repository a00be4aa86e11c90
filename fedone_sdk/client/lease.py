"""The deadline of an assignment, and its renewal."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from fedone_sdk.client.session import retry_after_s
from fedone_sdk.errors import MessageError, ProblemError, TransportError, is_retryable
from fedone_sdk.messages import Renewal

_RETRY_S = 3.0
_RETRY_SHARE = 0.1
"""Wait before a failed renewal is retried, seconds, or this share of a short deadline."""


class Lease:
    """An assignment's deadline, renewed in the background while the work takes longer.

    The deadline is relative, in seconds, and measured by the monotonic clock of the event loop,
    because the device's wall clock may be wrong.
    """

    def __init__(self, deadline_s: float, renew: Callable[[], Awaitable[Renewal]]) -> None:
        self._deadline_s = deadline_s
        self._renew = renew
        self._until = asyncio.get_running_loop().time() + deadline_s
        self._renewing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Lease:
        self._renewing = asyncio.create_task(
            self._renew_until_refused(), name="edge client renewal"
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)

    @property
    def left_s(self) -> float:
        """Seconds until the seat passes to another client, without another renewal."""
        return self._until - asyncio.get_running_loop().time()

    @property
    def renewable(self) -> bool:
        """Whether the server may still renew the lease."""
        return self._renewing is not None and not self._renewing.done()

    async def _renew_until_refused(self) -> None:
        wait_s = self._deadline_s / 2
        while True:
            await asyncio.sleep(wait_s)
            sent_at = asyncio.get_running_loop().time()
            try:
                renewed = await self._renew()
            except (ProblemError, TransportError, MessageError) as exc:
                if isinstance(exc, ProblemError) and not is_retryable(exc):
                    return  # the run allows no more renewals, or the seat is lost
                wait_s = max(min(_RETRY_S, self._deadline_s * _RETRY_SHARE), retry_after_s(exc))
            else:
                self._deadline_s = renewed.deadline_s
                self._until = sent_at + self._deadline_s
                wait_s = self._deadline_s / 2
