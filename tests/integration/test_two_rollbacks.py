"""Rollbacks of a served run, to snapshots of its rounds."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from fedone_sdk import EdgeClient
from fedone_sdk.aggregator import Service
from fedone_sdk.aggregator.rounds import machine
from fedone_sdk.aggregator.runs.served_run import ServedRun
from fedone_sdk.algorithms import alpha_sha256
from fedone_sdk.errors import ProblemError
from fedone_sdk.stores import SERVER, MemoryStore
from fedone_sdk.testing import ScriptedBackend
from tests.integration.test_edge_resume import client_of, serving, spec_of


@asynccontextmanager
async def played(
    rounds: int, exchange: str = "losses"
) -> AsyncIterator[tuple[Service, ServedRun, EdgeClient, list[str]]]:
    """A run of 8 rounds, some of them done, and the digest of alpha before each."""
    async with (
        serving(spec_of(exchange, rounds=8), ScriptedBackend()) as served,
        client_of(served, None) as client,
    ):
        run = served.runs["run"]
        digests = [alpha_sha256(run.state.method.alpha)]
        for _ in range(rounds):
            assert (await client.run_once()).outcome == "worked"
            digests.append(alpha_sha256(run.state.method.alpha))
        yield served, run, client, digests


@pytest.mark.parametrize("exchange", ["alpha", "losses"])
async def test_each_round_can_be_gone_back_to(exchange: str) -> None:
    async with played(4, exchange) as (served, run, client, digests):
        assert len(set(digests)) == 5
        for to_round in (3, 1, 0):
            await served.roll_back(run, to_round, "a client lied")
            assert run.state.round == to_round
            assert alpha_sha256(run.state.method.alpha) == digests[to_round]
            assert (await client.run_once()).outcome == "worked"
        # What was done again has taken the place of what was gone back over.
        again = alpha_sha256(run.state.method.alpha)
        assert (await client.run_once()).outcome == "worked"
        await served.roll_back(run, 1, "a client lied")
        assert alpha_sha256(run.state.method.alpha) == again


async def test_a_round_that_the_other_took_away_is_refused() -> None:
    async with played(3) as (served, run, _, digests):
        found = await asyncio.gather(
            served.roll_back(run, 1, "one person"),
            served.roll_back(run, 2, "another person"),
            return_exceptions=True,
        )
        assert found[0] is None
        assert isinstance(found[1], ProblemError)
        assert found[1].detail == "cannot roll back to round 2; the run has done 1 rounds"
        assert (run.state.round, run.state.rollbacks) == (1, 1)
        assert alpha_sha256(run.state.method.alpha) == digests[1]


async def test_a_long_run_keeps_some_of_its_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "MAX_SNAPSHOTS", 3)
    async with played(7) as (served, run, client, digests):
        assert run.machine.snapshot_every == math.ceil(8 / 3)
        store = served.store
        assert isinstance(store, MemoryStore)
        kept = [at for at in range(9) if await store.memory("run", SERVER, at) is not None]
        assert kept == [3, 6]
        with pytest.raises(ProblemError, match=r"no snapshot of round 4.*rounds 0, 3, 6, \.\.\."):
            await served.roll_back(run, 4, "a client lied")
        await served.roll_back(run, 3, "a client lied")
        assert alpha_sha256(run.state.method.alpha) == digests[3]
        assert (await client.run_once()).outcome == "worked"
