"""One of the processes of `shared_budget`: many callers that ask until the budget refuses them.

It prints how many answers came.
"""

from __future__ import annotations

import argparse
import asyncio
import os

from fedone_sdk.backends import LLMBackend, Query
from fedone_sdk.backends.build import build_backend
from fedone_sdk.budget import Budget, BudgetGuard, SqliteLedger
from fedone_sdk.errors import BackendError, BudgetExhausted
from fedone_sdk.spec import BackendSpec, LimitsSpec, PricesSpec, RetrySpec
from fedone_sdk.task import Part
from tests.chaos.provider import LABELS, MODEL, PRICE


async def ask_until_refused(backend: LLMBackend, name: str) -> int:
    """Asks something new each time; tells how many answers came."""
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


def spec_of(base_url: str, num_callers: int) -> BackendSpec:
    """The provider's model, with every wrapper."""
    return BackendSpec(
        kind="openai",
        model=MODEL,
        base_url=base_url,
        api_key_env=None,
        retry=RetrySpec(max_wait_s=0.02, breaker_failures=100_000),
        limits=LimitsSpec(concurrency=num_callers),
        prices=PricesSpec(prompt=PRICE.prompt, completion=PRICE.completion),
    )


async def work(base_url: str, budget: Budget, ledger: str, num_callers: int) -> int:
    """Lets the callers of one process work."""
    spec = spec_of(base_url, num_callers)
    guard = BudgetGuard(budget, ledger=SqliteLedger(ledger))
    async with build_backend(spec, guard=guard) as backend:
        names = [f"process {os.getpid()} caller {number}" for number in range(num_callers)]
        return sum(await asyncio.gather(*(ask_until_refused(backend, name) for name in names)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", required=True)
    parser.add_argument("--budget", required=True, type=Budget.model_validate_json)
    parser.add_argument("--ledger", required=True)
    parser.add_argument("--callers", required=True, type=int)
    options = parser.parse_args()
    work_of_all = work(options.base_url, options.budget, options.ledger, options.callers)
    print(asyncio.run(work_of_all))


if __name__ == "__main__":
    main()
