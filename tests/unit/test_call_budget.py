"""The budget of a call: reserved before, and neither lost nor used twice."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fedone_sdk.aggregator.model.calls import CallBudget
from fedone_sdk.budget import NOTHING, Usage
from fedone_sdk.errors import BudgetExhausted, FedOneError, ProblemError

ONE = Usage(requests=1, prompt_tokens=10)


class Run:
    """Grants so much more, and counts it."""

    run_id = "run"

    def __init__(self, most: int = 100) -> None:
        self.most = most
        self.asked = NOTHING
        self.replica = "replica"

    async def budget(self, first: Usage = NOTHING) -> CallBudget:
        """Return a budget with the first grant, which does not count."""
        most, self.most = self.most, 100
        run: Any = self
        purse = CallBudget(run, self.more)
        await purse.grant(first)
        self.most, self.asked = most, NOTHING
        return purse

    async def more(self, attempt: str, worst: Usage) -> None:
        await asyncio.sleep(0)
        if (self.asked + worst).requests > self.most:
            raise ProblemError("lease_exhausted", "no more requests")
        self.asked += worst


async def test_what_is_granted_is_spent_first() -> None:
    run = Run()
    purse = await run.budget(ONE * 2)
    for _ in range(2):
        async with purse.reserve(ONE) as lease:
            lease.settle(ONE)
    assert (purse.spent, run.asked) == (ONE * 2, NOTHING)
    async with purse.reserve(ONE):
        assert run.asked == ONE
    assert purse.granted == purse.spent == ONE * 3  # how the last one ended is not known


async def test_what_is_given_back_pays_for_the_next() -> None:
    run = Run()
    purse = await run.budget(ONE)
    async with purse.reserve(ONE) as lease:
        lease.settle(Usage(requests=1))
    async with purse.reserve(ONE) as lease:
        assert run.asked == Usage(requests=1)  # the tokens were left over
        lease.release()
    assert purse.spent == Usage(requests=1)


async def test_no_call_uses_a_pending_reservation_of_another() -> None:
    run = Run(most=3)
    purse = await run.budget()
    under_way: list[int] = []

    async def ask(number: int) -> None:
        async with purse.reserve(ONE):
            under_way.append(number)

    results = await asyncio.gather(*map(ask, range(5)), return_exceptions=True)
    assert under_way == [0, 1, 2]
    assert [type(result) for result in results] == [type(None)] * 3 + [BudgetExhausted] * 2
    assert purse.granted == purse.spent == run.asked == ONE * 3


async def test_a_refusal_is_remembered_and_costs_nothing() -> None:
    purse = await Run(most=0).budget(ONE)
    async with purse.reserve(ONE) as first:
        with pytest.raises(BudgetExhausted, match="no more requests"):
            async with purse.reserve(ONE):
                pytest.fail("it was not paid for")
        first.settle(ONE)
    assert purse.refusal is not None
    assert purse.refusal.code == "lease_exhausted"
    assert purse.granted == purse.spent == ONE


@pytest.mark.parametrize("failure", [asyncio.CancelledError, ZeroDivisionError])
async def test_a_failure_to_ask_for_more_leaves_no_reservation(
    failure: type[BaseException],
) -> None:
    async def more(attempt: str, worst: Usage) -> None:
        raise failure

    run: Any = Run()
    purse = CallBudget(run, more)
    with pytest.raises(failure):
        async with purse.reserve(ONE):
            pytest.fail("it was not paid for")
    assert purse.granted == purse.spent == NOTHING
    assert purse.refusal is None


async def test_a_provider_that_counts_more_is_paid_before_the_next_request() -> None:
    run = Run()
    purse = await run.budget(ONE * 2)
    async with purse.reserve(ONE) as lease:
        lease.settle(Usage(requests=1, prompt_tokens=25))
    assert purse.spent.prompt_tokens == 25
    async with purse.reserve(ONE) as lease:
        lease.settle(ONE)
    assert run.asked == Usage(prompt_tokens=15)


async def test_each_reservation_has_its_own_id_and_covers_only_itself() -> None:
    run: Any = Run()
    reserved: list[str] = []

    async def reserve(attempt: str, worst: Usage) -> None:
        reserved.append(attempt)

    purse = CallBudget(run, reserve)
    for replica, worst in (("before", ONE * 2), ("after", ONE), ("after", ONE)):
        run.replica = replica
        await purse.grant(worst)
    assert [attempt.partition("/")[0] for attempt in reserved] == ["before", "after", "after"]
    spent = Usage(requests=3, prompt_tokens=45)  # more tokens than any bound
    shares = dict(purse.shares(spent))
    assert list(shares) == reserved
    assert list(shares.values()) == [ONE * 2, ONE, Usage(prompt_tokens=15)]


async def test_refused_reservations_cover_nothing_and_unknown_ones_are_returned() -> None:
    run: Any = Run()
    asked: list[str] = []
    failures: list[Exception | None] = [
        None,
        ProblemError("lease_exhausted", "no more requests"),
        FedOneError("the store went away"),
    ]

    async def reserve(attempt: str, worst: Usage) -> None:
        asked.append(attempt)
        if (failure := failures.pop(0)) is not None:
            raise failure

    purse = CallBudget(run, reserve)
    await purse.grant(ONE)
    with pytest.raises(ProblemError):
        await purse.grant(ONE)
    with pytest.raises(FedOneError, match="went away"):
        await purse.grant(ONE)
    assert dict(purse.shares(ONE * 2)) == {asked[0]: ONE * 2, asked[2]: NOTHING}
