"""Durations when somebody sets a clock."""

from __future__ import annotations

import asyncio
import gc
import time
from dataclasses import replace

import pytest

from fedone_sdk.aggregator.rounds.lifecycle import charge_lost_replicas
from fedone_sdk.aggregator.rounds.machine import RoundMachine
from fedone_sdk.aggregator.rounds.run_state import Strikes
from fedone_sdk.clock import SystemClock, wait_until_s, within
from fedone_sdk.messages import Enrol
from fedone_sdk.stores import Member, MemoryStore
from fedone_sdk.testing import ManualClock
from tests.runs import TOKEN, run_spec, serving
from tests.unit.machine.game import ALL_GONE, Game, spec_of

DAYS = 2 * 86_400.0


@pytest.mark.parametrize("offset", [DAYS, -DAYS])
def test_the_system_clock_advances_by_elapsed_time(
    offset: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SystemClock()
    before, real = clock.now(), time.time
    monkeypatch.setattr(time, "time", lambda: real() + offset)
    assert 0 <= clock.now() - before < 60


async def test_a_call_that_fails_as_its_caller_is_cancelled_is_not_logged() -> None:
    logged: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: logged.append(context))

    async def failing() -> None:
        await asyncio.sleep(0)
        raise ValueError

    caller = asyncio.ensure_future(within(failing()))
    for _ in range(3):
        await asyncio.sleep(0)
    caller.cancel()
    await asyncio.wait({caller})
    del caller
    gc.collect()
    assert logged == []


@pytest.mark.parametrize("offset", [DAYS, -DAYS])
async def test_replicas_take_the_time_of_their_store(offset: float) -> None:
    class Shared(MemoryStore):
        async def now(self) -> float:
            return time.time() + offset

    async with serving(store=Shared(), clock=SystemClock()) as service:
        assert abs(service.clock.now() - time.time() - offset) < 60


@pytest.mark.parametrize("offset", [DAYS, -DAYS])
async def test_a_member_waits_as_long_as_any_other_after_a_restart(offset: float) -> None:
    store, clock = MemoryStore(), ManualClock()
    async with serving(run_spec(), store=store, clock=clock) as service:
        await service.access.enrol(TOKEN, Enrol())
        member = Member(client_index=0, num_examples=4, run_id=None, until=clock.now() + 600)
        await store.join(member)
    clock.advance(offset)
    async with serving(store=store, clock=clock) as service:
        pool = service.dispatcher.pool
        assert pool.members("run", clock.now()) == [0]
        clock.advance(601)
        assert pool.members("run", clock.now()) == []


def test_a_client_is_not_aside_for_days_after_a_restart() -> None:
    game = Game(spec_of())
    until = game.now + DAYS
    game.state = replace(game.state, strikes={0: Strikes(proven=3, until=until)})
    game.apply(charge_lost_replicas, **ALL_GONE)
    assert game.state.strikes[0].until == game.now + RoundMachine.LONGEST_ASIDE_S


def test_dates_of_a_header_are_compared_with_each_other() -> None:
    at, then = "Wed, 21 Oct 2015 07:27:00 GMT", "Wed, 21 Oct 2015 07:28:00 GMT"
    assert wait_until_s(then, at) == 60
    assert wait_until_s(at, then) == 0
    assert wait_until_s(then, None) is wait_until_s("soon", at) is None
