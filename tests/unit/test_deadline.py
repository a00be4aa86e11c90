"""The deadline of a device's work, and its renewal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from fedone_sdk.client.session import Deadline
from fedone_sdk.errors import MessageError, ProblemError, TransportError
from fedone_sdk.messages import Renewal
from tests.virtual_time import now, on_virtual_time


class Server:
    """Renews a lease of 100 s, but for times at which it fails.

    Attributes:
        asked: When it was asked.
    """

    def __init__(self, fails: Callable[[float], Exception | None] = lambda at: None) -> None:
        self.fails = fails
        self.asked: list[float] = []

    async def renew(self) -> Renewal:
        self.asked.append(now())
        failure = self.fails(now())
        if failure is not None:
            raise failure
        return Renewal(deadline_s=100)


@on_virtual_time
async def test_it_is_renewed_at_half_time() -> None:
    server = Server()
    async with Deadline(100, server.renew) as deadline:
        await asyncio.sleep(160)
        assert server.asked == [50, 100, 150]
        assert deadline.left_s == 90
    await asyncio.sleep(200)
    assert len(server.asked) == 3


@pytest.mark.parametrize(
    "failure",
    [
        TransportError("no route"),
        MessageError("a login page"),
        ProblemError("store_unavailable", "it may recover by itself; retry later", retry_after_s=1),
        ProblemError("internal", "see the server's log"),
    ],
    ids=lambda failure: type(failure).__name__,
)
def test_an_outage_at_half_time_is_survived(failure: Exception) -> None:
    @on_virtual_time
    async def play() -> None:
        server = Server(lambda at: failure if 45 < at < 60 else None)
        async with Deadline(100, server.renew) as deadline:
            await asyncio.sleep(99)
            assert server.asked == [50, 53, 56, 59, 62]
            assert deadline.left_s == pytest.approx(100 - (99 - 62))

    play()


@pytest.mark.parametrize(
    ("lease_s", "failure", "until", "asked"),
    [
        (2, TransportError("no route"), 1.2, [1.0, 1.2]),
        (100, ProblemError("rate_limited", "slowly", retry_after_s=20), 60, [50, 70]),
    ],
    ids=["short lease", "stated wait"],
)
def test_the_wait_after_a_failure(
    lease_s: float, failure: Exception, until: float, asked: list[float]
) -> None:
    @on_virtual_time
    async def play() -> None:
        server = Server(lambda at: failure if at < until else None)
        async with Deadline(lease_s, server.renew):
            await asyncio.sleep(lease_s * 0.95)
        assert server.asked == pytest.approx(asked)

    play()


@on_virtual_time
async def test_a_server_cannot_make_a_device_renew_without_a_pause() -> None:
    asked = 0

    async def hostile() -> Renewal:
        nonlocal asked
        asked += 1
        return Renewal(deadline_s=1e-9)

    async with Deadline(1e-9, hostile):
        await asyncio.sleep(10.1)
    assert asked == 50


@on_virtual_time
async def test_a_refusal_ends_it() -> None:
    server = Server(lambda at: ProblemError("renewal_refused", "often enough"))
    async with Deadline(100, server.renew) as deadline:
        await asyncio.sleep(99)
        assert not deadline.renewable
    assert server.asked == [50]


@on_virtual_time
async def test_the_server_reports_its_length() -> None:
    async def shorter() -> Renewal:
        return Renewal(deadline_s=20)

    async with Deadline(100, shorter) as deadline:
        await asyncio.sleep(51)
        assert deadline.left_s == 19
