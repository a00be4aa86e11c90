"""Work that outlives its caller: it completes, a stop waits for it, failures are logged."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from fedone_sdk.aggregator.concurrency import run_to_end, wait_pending
from fedone_sdk.errors import StoreUnavailable

MINE, OTHER = object(), object()


async def left_alone(ends_with: BaseException | None) -> list[str]:
    """Work whose caller is cancelled; return what it has done once none is pending."""
    done = []

    async def work() -> None:
        await asyncio.sleep(0.01)
        done.append("the whole work")
        if ends_with is not None:
            raise ends_with

    caller = asyncio.create_task(run_to_end(work(), owner=MINE))
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert not done
    await wait_pending(MINE)
    return done


@pytest.mark.parametrize("failure", [None, StoreUnavailable("the disk is full")])
def test_the_work_is_done_though_its_caller_has_gone(failure: Exception | None) -> None:
    """A reported failure is no bug, and is not logged."""
    with capture_logs() as logs:
        assert asyncio.run(left_alone(failure)) == ["the whole work"]
    assert not logs


async def test_work_of_others_is_not_waited_for() -> None:
    held = asyncio.Event()
    other = asyncio.create_task(run_to_end(held.wait(), owner=OTHER))
    await asyncio.sleep(0)
    async with asyncio.timeout(1):
        await wait_pending(MINE)
    stopping = asyncio.create_task(wait_pending(OTHER))
    await asyncio.sleep(0.01)
    assert not stopping.done()
    held.set()
    await stopping
    assert other.done()


def test_an_unobserved_failure_is_logged() -> None:
    with capture_logs() as logs:
        asyncio.run(left_alone(ZeroDivisionError("a flaw")))
    (entry,) = logs
    assert entry["log_level"] == "error"
    assert "ZeroDivisionError: a flaw" in entry["traceback"]


def test_a_ctrl_c_during_the_work_is_no_failure() -> None:
    with capture_logs() as logs, pytest.raises(KeyboardInterrupt):
        asyncio.run(left_alone(KeyboardInterrupt()))
    assert not logs
