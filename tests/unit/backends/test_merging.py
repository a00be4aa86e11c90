"""Queries that wait together are one query to the model, and each gets its own answer."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import numpy as np
import pytest

from fedone_sdk.backends import Answer, Query, score_all
from fedone_sdk.backends.wrappers import BudgetedBackend, MergingBackend
from fedone_sdk.budget import NOTHING
from fedone_sdk.errors import BackendError
from fedone_sdk.simulation import simulate
from fedone_sdk.soft_prompt import SoftPrompt
from fedone_sdk.task import Part, Rendered
from fedone_sdk.testing import ScriptedBackend
from tests.integration.test_population import federation_of

MODEL = Path(os.environ.get("FEDONE_SHARED", Path(__file__).parents[4] / "shared"))


def rendered(text: str) -> Rendered:
    return (Part("prompt", text), Part("field", "a film"), Part("mask", ""))


def query(*texts: str, words: tuple[str, ...] = (" bad", " good")) -> Query:
    return Query(inputs=tuple(rendered(text) for text in texts), label_words=words)


class Local(ScriptedBackend):
    """A local model: it takes a while."""

    async def score(self, query: Query) -> Answer:
        await asyncio.sleep(0)
        return await super().score(query)


async def asked_alone(queries: list[Query]) -> list[Answer]:
    return [await ScriptedBackend().score(query) for query in queries]


async def test_each_gets_its_own_answer() -> None:
    queries = [query(*(f"{number} {row}" for row in range(1 + number % 3))) for number in range(20)]
    local = Local()
    answers = await score_all(MergingBackend(local), queries)
    assert answers == await asked_alone(queries)
    assert len(local.asked) == 1
    assert local.asked[0].inputs == tuple(row for query in queries for row in query.inputs)


async def test_no_more_than_the_most_at_once() -> None:
    queries = [query(f"{number}", "and", "more") for number in range(20)]
    local = Local()
    answers = await score_all(MergingBackend(local, most_inputs=10), queries)
    assert answers == await asked_alone(queries)
    assert [len(asked.inputs) for asked in local.asked] == [9] * 6 + [6]


async def test_a_quote_is_the_most_that_its_share_can_be() -> None:
    merging = MergingBackend(Local())
    assert await merging.quote(query("a", "b")) == merging.worst_case(2)


async def test_the_limit_of_the_model_holds_too() -> None:
    local = Local()
    local.max_inputs = 4
    await score_all(MergingBackend(local), [query("a", "b", "c"), query("d"), query("e")])
    assert [len(asked.inputs) for asked in local.asked] == [4, 1]


async def test_what_comes_meanwhile_gathers() -> None:
    held = asyncio.Event()
    local = Local(gate=lambda query: held.wait())
    merging = MergingBackend(local)
    first = asyncio.create_task(merging.score(query("a")))
    while not local.asked:
        await asyncio.sleep(0)
    later = [asyncio.create_task(merging.score(query(text))) for text in "bcd"]
    await asyncio.sleep(0)
    held.set()
    await asyncio.gather(first, *later)
    assert [len(asked.inputs) for asked in local.asked] == [1, 3]


@pytest.mark.parametrize(
    "other",
    [
        query("b", words=(" no", " yes")),
        Query(inputs=(rendered("b"),), want="reference", references=("x",)),
        Query(
            inputs=(rendered("b"),),
            label_words=(" bad", " good"),
            soft_prompt=SoftPrompt("embeddings", (1, 1), bytes(4)),
        ),
    ],
    ids=["other words", "another question", "a soft prompt"],
)
async def test_only_what_is_alike_is_merged(other: Query) -> None:
    local = Local()
    queries = [query("a"), other, query("c")]
    assert await score_all(MergingBackend(local), queries) == await asked_alone(queries)
    assert [len(asked.inputs) for asked in local.asked] == [2, 1]


async def test_references_stay_with_their_inputs() -> None:
    queries = [
        Query(inputs=(rendered(f"{number}"),), want="reference", references=(f"text {number}",))
        for number in range(5)
    ]
    local = Local()
    assert await score_all(MergingBackend(local), queries) == await asked_alone(queries)
    assert len(local.asked) == 1


async def test_who_is_to_blame_fails_alone() -> None:
    def gate(asked: Query) -> None:
        if any(row[0].text == "broken" for row in asked.inputs):
            raise BackendError("too long")

    merging = MergingBackend(Local(gate=gate))
    calls = [merging.score(query(text)) for text in ("a", "broken", "c")]
    found = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(found[1], BackendError)
    assert [found[0], found[2]] == await asked_alone([query("a"), query("c")])


async def test_who_goes_away_is_not_asked_for() -> None:
    local = Local()
    merging = MergingBackend(local)
    gone = asyncio.create_task(merging.score(query("gone")))
    stays = asyncio.create_task(merging.score(query("stays")))
    await asyncio.sleep(0)
    gone.cancel()
    assert [await stays] == await asked_alone([query("stays")])
    assert [row[0].text for asked in local.asked for row in asked.inputs] == ["stays"]


async def test_who_goes_away_while_its_query_fails_takes_nobody_along() -> None:
    held = asyncio.Event()

    async def gate(asked: Query) -> None:
        if any(row[0].text == "broken" for row in asked.inputs):
            if len(asked.inputs) == 1:
                await held.wait()
            raise BackendError("too long")

    local = Local(gate=gate)
    merging = MergingBackend(local)
    broken = asyncio.create_task(merging.score(query("broken")))
    others = [asyncio.create_task(merging.score(query(text))) for text in "ab"]
    while len(local.asked) < 2:  # All together, and the broken one alone.
        await asyncio.sleep(0)
    late = asyncio.create_task(merging.score(query("late")))
    await asyncio.sleep(0)
    broken.cancel()
    await asyncio.sleep(0)
    held.set()
    async with asyncio.timeout(10):  # Nobody would ever answer them.
        found = await asyncio.gather(*others, late, return_exceptions=True)
    assert found == await asked_alone([query(text) for text in ("a", "b", "late")])


async def test_the_end_frees_who_waits() -> None:
    async def never(query: Query) -> None:
        await asyncio.Event().wait()

    merging = MergingBackend(Local(gate=never))
    waits = [asyncio.create_task(merging.score(query(text))) for text in "ab"]
    await asyncio.sleep(0)
    await merging.aclose()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.gather(*waits)


@pytest.mark.parametrize("wrong", [{"most_inputs": 0}, {"at_once": 0}])
def test_settings_that_cannot_be(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        MergingBackend(Local(), **wrong)


def test_who_charges_requests_is_not_merged() -> None:
    with pytest.raises(ValueError, match="payer"):
        MergingBackend(BudgetedBackend(Local()))


async def test_clients_of_a_round_share_passes() -> None:
    """A model that is exact gives the same run, and is asked a fraction as often."""
    federation = federation_of(clients_per_round=10, exchange="losses", rounds=3)
    alone, local = ScriptedBackend(), Local()
    first = await simulate(federation, backend=alone, transport="memory")
    merged = await simulate(federation, backend=MergingBackend(local), transport="memory")
    assert merged.alpha_sha256 == first.alpha_sha256
    assert merged.spent == first.spent
    assert merged.model != first.model
    assert len(alone.asked) == 3 * 10 * 4
    assert len(local.asked) < len(alone.asked) / 4


async def test_a_real_model_in_float32() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    folder = MODEL / "models" / "roberta-mini"
    if not folder.exists():
        pytest.skip("needs roberta-mini under FEDONE_SHARED")
    from fedone_sdk.backends import TransformersBackend

    backend = TransformersBackend(folder, device="cpu")
    try:
        queries = [query(*(f"word {n} " * n for n in range(1, 2 + k))) for k in range(6)]
        alone = await score_all(backend, queries, concurrency=1)
        merged = await score_all(MergingBackend(backend), queries)
    finally:
        await backend.aclose()
    usages = [sum((answer.usage for answer in answers), NOTHING) for answers in (alone, merged)]
    assert usages[0] == usages[1]
    for one, other in zip(alone, merged, strict=True):
        np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-4)  # type: ignore[arg-type]
