"""Three aggregators on one PostgreSQL, some of them killed with -9.

The quick form of ``python -m tests.chaos.servers``.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from fedone_sdk.client.transport import HttpTransport
from fedone_sdk.errors import TransportError
from fedone_sdk.messages import Claim, Enrol, LossesAssignment
from tests.chaos import servers
from tests.chaos.servers import databases_of
from tests.chaos.serving import TOKEN, Death, Deployment, Scenario
from tests.postgres import Cluster

SCENARIO = Scenario(exchange="losses", clients_per_round=2, rounds=4, num_clients=4)


@pytest.mark.parametrize(
    "death",
    [
        Death(at=2, what="question"), Death(at=4, when="before"), Death(at=4, when="during"),
        Death(at=4, when="after"), Death(at=1, what="lead"),
    ],
    ids=lambda death: f"{death.what} {death.when}",
)  # fmt: skip
async def test_one_dies_during_a_round(death: Death, postgres: Cluster) -> None:
    deaths = dict.fromkeys(range(servers.NUM_REPLICAS), death)
    figures = await servers.play(
        SCENARIO,
        deaths,
        databases=databases_of(postgres),
        replicas=servers.NUM_REPLICAS,
        keep=False,
    )
    assert figures.violations == []
    assert figures.kills >= 1
    assert (figures.runs_as_without_kills, figures.acknowledged_updates_lost) == (1, 0)
    assert figures.updates_acknowledged >= SCENARIO.rounds * SCENARIO.clients_per_round


async def test_deadlines_fire_when_the_leader_has_died(postgres: Cluster, tmp_path: Path) -> None:
    scenario = Scenario(exchange="losses", rounds=2, num_clients=2, deadline_s=2.0)
    with databases_of(postgres)() as url:
        deployment = Deployment(scenario, tmp_path, store=url, replicas=servers.NUM_REPLICAS)
        # The first life of each ends when it leads for the second time: the lead goes around.
        deaths = {n: Death(at=2, what="lead") for n in range(servers.NUM_REPLICAS)}
        tasks = deployment.start(deaths)
        transports = [HttpTransport(address) for address in deployment.urls]
        try:
            waited_s = await _seconds_to_the_next(transports)
        finally:
            deployment.kill_all()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for transport in transports:
                await transport.aclose()
    assert deployment.outcome.kills >= 1
    assert scenario.deadline_s - 0.5 < waited_s < scenario.deadline_s + 5


async def _seconds_to_the_next(transports: list[HttpTransport]) -> float:
    """How long the other device waits for the work of one that never comes back."""
    devices = [(await _patiently(transports, "enrol", TOKEN, Enrol())).credential for _ in range(2)]
    message = Claim(num_examples=3, wait_s=20)
    claims = [
        asyncio.create_task(_patiently(transports[number:], "claim", device, message))
        for number, device in enumerate(devices)
    ]
    try:
        await asyncio.wait(claims, timeout=30, return_when=asyncio.FIRST_COMPLETED)
        began = time.monotonic()
        (first,) = [claim for claim in claims if claim.done()]
        (other,) = [claim for claim in claims if claim is not first]
        assert isinstance(first.result(), LossesAssignment)
        async with asyncio.timeout(30):
            assert isinstance(await other, LossesAssignment)
        return time.monotonic() - began
    finally:
        for claim in claims:
            claim.cancel()


async def _patiently(transports: list[HttpTransport], name: str, *args: object) -> Any:
    """Asks one replica after the other until one answers with more than a pause."""
    for number in range(10_000):
        try:
            answer = await getattr(transports[number % len(transports)], name)(*args)
        except TransportError:
            await asyncio.sleep(0.02)
            continue
        if not hasattr(answer, "retry_after_s"):
            return answer
    raise TimeoutError
