from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from decimal import Decimal
from typing import Any

import pytest
import structlog

from fedone_sdk.aggregator.model.calls import CallBudget
from fedone_sdk.backends.base import Answer, LLMBackend, Query
from fedone_sdk.backends.model_client import ModelClient
from fedone_sdk.budget import NOTHING, Budget, BudgetGuard, Lease, Usage
from fedone_sdk.budget.prices import FREE, Price
from fedone_sdk.errors import (
    BackendBlocked,
    BackendError,
    BackendUnavailable,
    BudgetExhausted,
    FedOneError,
    ProblemError,
)
from fedone_sdk.task import Part

PRICE = Price(prompt=Decimal("2.50"), completion=Decimal("10.00"))
QUOTE = Usage(queries=1, requests=1, prompt_tokens=400, completion_tokens=2)
USED = Usage(requests=1, prompt_tokens=300, completion_tokens=1)
ALL = frozenset({"queries", "requests", "tokens", "prompt_tokens", "completion_tokens"})


class Model(LLMBackend):
    """Use `usage`, or end as `ending` defines."""

    bounds = ALL

    def __init__(self, usage: Usage = USED, ending: Callable[[], Any] | None = None) -> None:
        self.usage, self.ending = usage, ending
        self.sent = 0

    @property
    def fingerprint(self) -> str:
        return "model:1"

    async def score(self, query: Query) -> Answer:
        self.sent += 1
        if self.ending is not None:
            ended = self.ending()
            if asyncio.iscoroutine(ended):
                await ended
        return Answer(log_probs=((-1.0,),), usage=self.usage)

    def worst_case(self, batch_size: int, max_tokens: int = 0) -> Usage:
        return Usage(queries=1, requests=1, prompt_tokens=400 * batch_size, completion_tokens=2)


def failing(error: BaseException) -> Callable[[], Any]:
    def ending() -> None:
        raise error

    return ending


def ask(payer: BudgetGuard | None = None) -> Query:
    return Query(inputs=((Part("field", "a"),),), label_words=(" b",), payer=payer)


def guard_of(**caps: Any) -> BudgetGuard:
    return BudgetGuard(Budget.model_validate(caps) if caps else None, name="run")


def usd(usage: Usage) -> Decimal:
    tokens = usage.prompt_tokens * PRICE.prompt + usage.completion_tokens * PRICE.completion
    return tokens / 10**6


def priced(usage: Usage) -> Usage:
    return usage.model_copy(update={"usd": usd(usage)})


async def test_quotes_have_their_money() -> None:
    backend = ModelClient(Model(), price=PRICE)
    assert backend.metered
    assert await backend.quote(ask()) == priced(QUOTE)
    assert backend.worst_case(3).usd == Decimal("0.00302")  # (1200 * 2.5 + 2 * 10) / 1e6
    assert isinstance(backend.worst_case(3).usd, Decimal)


async def test_guard_and_payer_both_pay_what_was_used() -> None:
    guard, payer = guard_of(requests=5), guard_of(usd=1)
    answer = await ModelClient(Model(), price=PRICE, guard=guard).score(ask(payer))
    assert answer.usage == priced(USED)
    for one in (guard, payer):
        account = await one.account()
        assert account.spent == priced(USED)
        assert not account.leases
    only = guard_of(requests=1)
    await ModelClient(Model(), guard=only).score(ask(only))  # It pays once.
    assert (await only.account()).spent.requests == 1


async def test_the_worst_case_is_held_while_the_request_is_pending() -> None:
    payer = guard_of(usd=1)
    seen: list[Usage] = []

    async def look() -> None:
        seen.append((await payer.account()).leased)

    await ModelClient(Model(ending=look), price=PRICE).score(ask(payer))
    # No queries: they are counted by who asks.
    assert seen == [priced(QUOTE).without_queries()]


@pytest.mark.parametrize("short", ["guard", "payer"])
async def test_what_does_not_fit_is_not_sent_and_costs_nothing(short: str) -> None:
    model = Model()
    tight, wide = guard_of(usd="0.00101"), guard_of(usd=1)  # it takes 0.00102
    guard, payer = (tight, wide) if short == "guard" else (wide, tight)
    with pytest.raises(BudgetExhausted, match="usd"):
        await ModelClient(model, price=PRICE, guard=guard).score(ask(payer))
    assert model.sent == 0
    assert (await guard.account()).held == NOTHING
    assert (await payer.account()).held == NOTHING


async def test_a_cancelled_second_reservation_gives_the_first_back() -> None:
    class Slow(BudgetGuard):
        @asynccontextmanager
        async def reserve(self, worst: Usage) -> AsyncIterator[Lease]:
            await asyncio.sleep(3600)
            yield Lease("never", worst)

    model, guard = Model(), guard_of(requests=1)
    backend = ModelClient(model, guard=guard)
    task = asyncio.create_task(backend.score(ask(Slow(None))))
    await asyncio.sleep(0)
    assert (await guard.account()).leased.requests == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await guard.account()).held == NOTHING
    assert model.sent == 0


@pytest.mark.parametrize(
    ("error", "charged"),
    [
        (BackendUnavailable("429", usage=Usage(requests=1)), priced(Usage(requests=1))),
        (BackendBlocked("never sent", usage=NOTHING), NOTHING),
        (BackendUnavailable("timed out"), priced(QUOTE).without_queries()),
        (BackendError("refused", usage=USED), priced(USED)),
        (RuntimeError("a bug"), priced(QUOTE).without_queries()),
    ],
    ids=["known", "nothing", "unknown", "refused", "bug"],
)
async def test_a_failure_costs_what_is_known_of_it_and_else_everything(
    error: Exception, charged: Usage
) -> None:
    payer = guard_of()
    with pytest.raises(type(error)):
        await ModelClient(Model(ending=failing(error)), price=PRICE).score(ask(payer))
    assert (await payer.account()).held == charged


async def test_a_cancelled_request_is_charged_in_full() -> None:
    payer, model = guard_of(), Model(ending=lambda: asyncio.sleep(3600))
    task = asyncio.create_task(ModelClient(model, price=PRICE).score(ask(payer)))
    while not model.sent:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    account = await payer.account()
    assert account.spent == priced(QUOTE).without_queries()
    assert not account.leases


async def test_a_bill_above_the_quote_is_charged_and_logged() -> None:
    more = Usage(requests=1, prompt_tokens=500, completion_tokens=2)
    payer = guard_of(usd="0.00102")
    with structlog.testing.capture_logs() as logs:
        answer = await ModelClient(Model(more), price=PRICE).score(ask(payer))
    assert answer.usage == priced(more)
    assert (await payer.account()).spent == priced(more)  # above the cap, as it is in truth
    (entry,) = logs
    assert entry["log_level"] == "warning"
    assert entry["beyond"]["prompt_tokens"] == 100
    assert Decimal(entry["beyond"]["usd"]) == Decimal("0.00025")


async def test_without_a_price_the_models_own_money_is_kept() -> None:
    billed, payer = USED.model_copy(update={"usd": Decimal("0.01")}), guard_of()
    assert (await ModelClient(Model(billed)).score(ask(payer))).usage == billed
    assert (await payer.account()).spent == billed


@pytest.mark.parametrize(
    ("inner", "price", "bounded"),
    [
        (ALL, PRICE, True),
        (ALL, FREE, True),
        (ALL, None, False),
        (ALL | {"usd"}, None, True),  # a gateway knows its own prices
        ({"queries", "requests"}, FREE, True),
        # Tokens cost money, but their number has no bound.
        ({"queries", "requests"}, PRICE, False),
        ({"queries", "requests", "usd"}, PRICE, False),
    ],
)
def test_money_is_bounded_where_all_that_costs_money_is(
    inner: set[str], price: Price | None, bounded: bool
) -> None:
    model = Model()
    model.bounds = frozenset(inner)
    bounds = ModelClient(model, price=price).bounds
    assert ("usd" in bounds) == bounded
    assert bounds - {"usd"} == inner - {"usd"}


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

    async def more(self, lease_id: str, worst: Usage, billed: bool) -> None:
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
    async def more(lease_id: str, worst: Usage, billed: bool) -> None:
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

    async def reserve(lease_id: str, worst: Usage, billed: bool) -> None:
        reserved.append(lease_id)

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

    async def reserve(lease_id: str, worst: Usage, billed: bool) -> None:
        asked.append(lease_id)
        if (failure := failures.pop(0)) is not None:
            raise failure

    purse = CallBudget(run, reserve)
    await purse.grant(ONE)
    with pytest.raises(ProblemError):
        await purse.grant(ONE)
    with pytest.raises(FedOneError, match="went away"):
        await purse.grant(ONE)
    assert dict(purse.shares(ONE * 2)) == {asked[0]: ONE * 2, asked[2]: NOTHING}
