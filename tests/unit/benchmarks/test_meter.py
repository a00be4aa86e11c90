from __future__ import annotations

import asyncio

from fedone_sdk.backends import Query
from fedone_sdk.backends.wrappers import CachedBackend
from fedone_sdk.task import Part
from fedone_sdk.testing import ScriptedBackend
from tests.benchmarks.queries.meter import Bill, Meter


def query(*texts: str) -> Query:
    inputs = tuple((Part("prompt", " p"), Part("field", text)) for text in texts)
    return Query(inputs=inputs, label_words=(" no", " yes"))


def test_bills_what_was_not_asked_before() -> None:
    model = ScriptedBackend()
    meter = Meter(CachedBackend(model))

    async def ask() -> list[Bill]:
        bills = []
        for asked in (query("a", "b"), query("a", "b"), query("b", "a"), query("a", "c")):
            await meter.score(asked)
            bills.append(meter.bill)
        return bills

    assert asyncio.run(ask()) == [
        Bill(requests=1, example_requests=2, tokens=2),
        Bill(requests=1, example_requests=2, tokens=2),
        # Another query, of the same questions.
        Bill(requests=2, example_requests=2, tokens=4),
        Bill(requests=3, example_requests=3, tokens=6),
    ]
    assert len(model.asked) == meter.bill.requests
