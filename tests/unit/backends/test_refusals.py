from __future__ import annotations

from dataclasses import replace

import pytest

from fedone_sdk.backends import Answer, ModelClient, Query
from fedone_sdk.budget import BudgetGuard, Usage
from fedone_sdk.errors import BackendRefused, FormBlocked
from fedone_sdk.spec import RetrySpec
from fedone_sdk.task import Part
from fedone_sdk.testing import ScriptedBackend

ONE = Usage(requests=1)


class Picky(ScriptedBackend):
    """Refuses each request that has one of some texts."""

    def __init__(self, *flagged: str, max_inputs: int = 1) -> None:
        super().__init__()
        self.flagged = flagged
        self.max_inputs = max_inputs

    async def score(self, query: Query) -> Answer:
        answer = await super().score(query)
        if any(part.text in self.flagged for parts in query.inputs for part in parts):
            raise BackendRefused("refused", said="flagged by policy", usage=ONE)
        return answer


def ask(*texts: str, device: str = "", template: str = "Q: ") -> Query:
    return Query(
        inputs=tuple((Part("text", template), Part("field", text)) for text in texts),
        label_words=(" no", " yes"),
        scope=("run", device) if device else (),
    )


def client_of(inner: Picky) -> ModelClient:
    return ModelClient(inner, retry=RetrySpec())


async def test_one_of_a_batch_fails_alone() -> None:
    inner = Picky("x", max_inputs=8)
    answer = await client_of(inner).score(ask(*"abcdefgx"))
    assert [row is None for row in answer.log_probs] == [False] * 7 + [True]
    assert len(inner.asked) == 7  # Four with it, and their three other halves.
    inner.flagged, payer = ("x", "Q: "), BudgetGuard(None)
    with pytest.raises(FormBlocked) as caught:
        await client_of(inner).score(replace(ask("x", "y"), payer=payer))
    assert caught.value.usage == (await payer.account()).spent


async def test_one_device_does_not_block_the_others() -> None:
    client = client_of(Picky("x"))
    for _ in range(300):
        assert (await client.score(ask("x", device="a"))).log_probs == (None,)
    assert (await client.score(ask("fine", device="b"))).log_probs != (None,)


async def test_inputs_of_several_devices_are_evidence() -> None:
    inner = Picky("x")
    client = client_of(inner)
    for number in range(15):
        await client.score(ask("x", device=f"device-{number % 2}"))
    with pytest.raises(FormBlocked, match=r"16 inputs in a row.*flagged by policy"):
        await client.score(ask("x", device="device-1"))
    assert len(inner.asked) < 24


async def test_a_form_that_is_refused_leaves_others_alone_until_a_reset() -> None:
    inner = Picky("Bad form: ")
    client = client_of(inner)
    for _ in range(3):
        with pytest.raises(FormBlocked, match="even a neutral one"):
            await client.score(ask("a", device="a", template="Bad form: "))
        await client.score(ask("a", device="a"))
    assert len(inner.asked) == 2 + 3
    assert client.trouble is None
    inner.flagged = ()
    client.reset()
    assert (await client.score(ask("a", template="Bad form: "))).log_probs != (None,)


async def test_refusals_that_begin_later_stop_too() -> None:
    inner = Picky("x")
    client = client_of(inner)
    await client.score(ask(*"abc"))
    inner.flagged = ("Q: ",)
    with pytest.raises(FormBlocked):
        await client.score(ask(*"defghijklmnop"))
    assert len(inner.asked) <= 3 + 13 + 1
