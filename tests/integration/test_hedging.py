"""Slow clients in a served run: the watcher finds them, a waiting client gets their work too."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from fedone_sdk.aggregator import Service
from fedone_sdk.aggregator.auth import Authority
from fedone_sdk.aggregator.pool import TurnedAway
from fedone_sdk.aggregator.replay import compare
from fedone_sdk.budget import Usage
from fedone_sdk.errors import ProblemError
from fedone_sdk.messages import Claim, Enrol, LossesAssignment, LossesUpdate, Scored
from fedone_sdk.spec import RunSpec
from fedone_sdk.stores import ClientRecord, MemoryStore
from fedone_sdk.testing import ManualClock
from fedone_sdk.vocabulary import Vocabulary

WORDS = Vocabulary(candidates=(" good", " bad", " fine"))
SPEC = RunSpec.model_validate(
    {
        "task": {"template": "{prompt} {text} {mask}", "labels": {0: " no", 1: " yes"}},
        "prompt": {"length": 2, "vocabulary": {"kind": "list", "candidates": ["x", "y"]}},
        "method": {"name": "gs-bdpl", "num_samples": 4, "batch_size": 2, "tau": 1.0},
        "participation": {"exchange": "losses", "min_clients": 2, "hedge_after_s": 30},
        "rounds": 1,
        "evaluation": {"every": 0},
    }
)


@asynccontextmanager
async def serving(store: MemoryStore, clock: ManualClock) -> AsyncIterator[Service]:
    service = Service(store=store, clock=clock, authority=Authority(enrolment_tokens=["t"]))
    await service.start()
    try:
        yield service
    finally:
        await service.stop()


async def claim(service: Service, client: ClientRecord, wait_s: float) -> LossesAssignment | None:
    found = await service.claim(client, Claim(num_examples=5, wait_s=wait_s))
    assert isinstance(found, (LossesAssignment, TurnedAway))
    return None if isinstance(found, TurnedAway) else found


def update_for(work: LossesAssignment) -> LossesUpdate:
    losses = tuple(0.5 + 0.25 * number for number in range(work.leased_queries))
    return LossesUpdate(
        num_examples=5, scored=Scored(scored=2), usage=Usage(), model="m", losses=losses
    )


async def test_a_waiting_client_gets_the_work_of_a_slow_one() -> None:
    store, clock = MemoryStore(), ManualClock()
    async with serving(store, clock) as service:
        run = await service.add_run(SPEC, WORDS)
        identities = [await service.enrol("t", Enrol()) for _ in range(2)]
        clients = [await service.client(identity.credential) for identity in identities]
        polls = [asyncio.create_task(claim(service, client, 60)) for client in clients]
        done, waiting = await asyncio.wait(polls, return_when=asyncio.FIRST_COMPLETED, timeout=10)
        (first_poll,), (second_poll,) = done, waiting
        slow, first = clients[polls.index(first_poll)], first_poll.result()
        fast = clients[polls.index(second_poll)]
        assert first is not None
        assert run.due == clock.now() + 30
        clock.advance(30)
        service.replicas.notice()  # the manual clock wakes nobody
        async with asyncio.timeout(10):
            second = await second_poll
        assert second is not None
        assert second.assignment_id != first.assignment_id
        assert run.state.account.leased == Usage(queries=8)

        await service.update(fast, second.assignment_id, update_for(second), "ab" * 32)
        assert run.state.status == "completed"
        with pytest.raises(ProblemError, match="another client was faster") as caught:
            await service.update(slow, first.assignment_id, update_for(first), "cd" * 32)
        assert caught.value.code == "assignment_expired"
        assert run.state.account.spent == Usage(queries=8)
        assert run.state.account.leased == Usage()

        (entry,) = [line for line in await store.log(run.run_id) if line.kind == "round"]
        assert [seat["client"] for seat in json.loads(entry.body)["seats"]] == [fast.index]
        snapshot = await store.snapshot(run.run_id)
        assert snapshot is not None
        assert compare(snapshot).agrees
