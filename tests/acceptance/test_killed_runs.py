"""Runs and processes that signals end, checked against the provider's own count.

The quick form of ``python -m tests.chaos.killed_runs``.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedone_sdk.backends import LLMBackend, Query
from fedone_sdk.backends.build import build_backend
from fedone_sdk.budget import Budget, BudgetGuard, SqliteLedger
from fedone_sdk.errors import BackendError, BudgetExhausted
from fedone_sdk.spec import BackendSpec, LimitsSpec, PricesSpec, RetrySpec
from fedone_sdk.task import Part
from tests.chaos import killed_runs
from tests.chaos.killed_runs import Kill
from tests.chaos.provider import ERRORS, LABELS, MODEL, PRICE, Provider

KILLS = (Kill(request=4, delay_s=0.0), Kill(request=9, delay_s=0.01))


@pytest.mark.parametrize("flags", ["default", "named"])
async def test_a_killed_run_ends_as_one_that_was_not(flags: str) -> None:
    plan = killed_runs.Plan.draw(0, flags=flags)
    plan = replace(plan, kills=KILLS, clients_per_round=2)
    figures = await killed_runs.play(plan, keep=False)
    assert figures.violations == []
    assert figures.kills == 2
    assert (figures.runs_with_the_same_alpha, figures.runs_compared) == (1, 1)
    assert figures.answers_in_the_caches > 0


@pytest.mark.parametrize("exchange", ["alpha", "losses"])
async def test_a_stopped_run_loses_no_answer_and_ends_the_same(exchange: str) -> None:
    plan = killed_runs.Plan.draw(0)
    stops = (
        Kill(request=2, delay_s=0.0, name="SIGTERM"),
        Kill(request=7, delay_s=0.01, name="SIGINT"),
        Kill(request=3, delay_s=0.0, name="SIGINT", again_s=0.0),
    )
    plan = replace(plan, kills=stops, exchange=exchange, rounds=5, latency_s=0.02)
    figures = await killed_runs.play(plan, keep=False)
    assert figures.violations == []
    assert figures.signals == {"SIGTERM": 1, "SIGINT": 2}
    assert figures.kills_by_a_single_signal >= 2
    assert figures.answers_lost_by_these_kills == 0
    assert (figures.runs_with_the_same_alpha, figures.runs_compared) == (1, 1)


@pytest.mark.parametrize("cap", [Budget(requests=40), Budget(usd="0.02")], ids=["requests", "usd"])
async def test_the_cap_holds_under_kills_and_errors(cap: Budget) -> None:
    plan = replace(killed_runs.Plan.draw(1), cap=cap, kills=KILLS, evaluates=False)
    figures = await killed_runs.play(plan, keep=False)
    assert figures.violations == []
    assert figures.kills > 0
    # It ends at its cap, and not for want of work.
    assert figures.final_status == {"budget_exhausted": 1}
    assert figures.requests_received > 4


async def ask_until_refused(backend: LLMBackend, name: str) -> int:
    """Ask something new each time; return how many answers came."""
    answers = 0
    while True:
        part = Part("field", f"{name} {answers} It was")
        try:
            await backend.score(Query(inputs=((part,),), label_words=LABELS))
        except BudgetExhausted:
            return answers
        except BackendError:
            continue  # Too many errors in a row.
        answers += 1


@settings(max_examples=8, suppress_health_check=[HealthCheck.too_slow])
@given(
    num_callers=st.sampled_from([1, 20, 200]),
    cap=st.one_of(
        st.builds(Budget, requests=st.integers(0, 100)),
        st.builds(Budget, tokens=st.integers(0, 10_000)),
        st.builds(Budget, usd=st.decimals("0", "0.08", places=4)),
    ),
    worse=st.floats(0, 3),
    patience_s=st.floats(0, 0.3),
    seed=st.integers(0, 2**32),
)
def test_any_failure_and_any_disconnect(
    num_callers: int, cap: Budget, worse: float, patience_s: float, seed: int
) -> None:
    """Callers of one process that are cancelled at any moment leave no lease open."""
    rng = random.Random(seed)

    async def ask(folder: Path) -> None:
        chances = {behaviour: chance * worse for behaviour, chance in ERRORS.items()}
        async with Provider(cap=cap, chances=chances, seed=seed) as provider:
            guard = BudgetGuard(cap, ledger=SqliteLedger(folder / "budget.db"))
            spec = BackendSpec(
                kind="openai",
                model=MODEL,
                base_url=provider.base_url,
                api_key_env=None,
                retry=RetrySpec(max_wait_s=0.02, breaker_failures=100_000),
                limits=LimitsSpec(concurrency=num_callers),
                prices=PricesSpec(prompt=PRICE.prompt, completion=PRICE.completion),
            )
            async with build_backend(spec, folder, guard=guard) as backend:
                callers = [
                    asyncio.create_task(ask_until_refused(backend, f"caller {number}"))
                    for number in range(num_callers)
                ]
                loop = asyncio.get_running_loop()
                for caller in rng.sample(callers, num_callers // 2):
                    loop.call_later(rng.uniform(0, patience_s), caller.cancel)
                ends = await asyncio.gather(*callers, return_exceptions=True)
            account, total = await guard.account(), provider.total()
        assert all(isinstance(end, int | asyncio.CancelledError) for end in ends)
        assert provider.overshoot == []
        assert account.leases == {}
        assert total.beyond(account.spent) == total - total
        assert all(amount <= limit for _, limit, amount in cap.pairs(account.spent))

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(ask(Path(folder)))
