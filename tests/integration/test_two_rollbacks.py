"""Concurrent rollbacks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from fedone_sdk import EdgeClient
from fedone_sdk.aggregator import Service
from fedone_sdk.aggregator.rounds.replay import compare
from fedone_sdk.aggregator.serving.run import ServedRun
from fedone_sdk.aggregator.serving.steering import Steering
from fedone_sdk.errors import ProblemError
from fedone_sdk.testing import ScriptedBackend
from tests.integration.test_edge_resume import client_of, serving, spec_of


class SlowLookup:
    """Holds the first rollback back when it has looked up where the run stood."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done, self.go_on = asyncio.Event(), asyncio.Event()
        looked_back = Steering._state_at_round

        async def slow(served: Steering, run: ServedRun, to_round: int) -> Any:
            found = await looked_back(served, run, to_round)
            if not self.done.is_set():
                self.done.set()
                await self.go_on.wait()
            return found

        monkeypatch.setattr(Steering, "_state_at_round", slow)


@asynccontextmanager
async def three_rounds() -> AsyncIterator[tuple[Service, ServedRun, EdgeClient]]:
    async with (
        serving(spec_of("losses", rounds=8), ScriptedBackend()) as served,
        client_of(served, None) as client,
    ):
        for _ in range(3):
            assert (await client.run_once()).outcome == "worked"
        yield served, served.runs["run"], client


async def agrees(served: Service) -> bool:
    """Whether the log gives the alpha that the run has."""
    snapshot = await served._store.snapshot("run")
    assert snapshot is not None
    return compare(snapshot).agrees


async def test_a_rollback_applies_to_what_another_left(monkeypatch: pytest.MonkeyPatch) -> None:
    lookup = SlowLookup(monkeypatch)
    async with three_rounds() as (served, run, client):
        rollback = asyncio.create_task(served.steering.roll_back(run, 2, "one person"))
        await lookup.done.wait()
        await served.steering.roll_back(run, 0, "another person")
        for _ in range(4):
            assert (await client.run_once()).outcome == "worked"
        lookup.go_on.set()
        await rollback
        assert (run.state.round, run.state.rollbacks) == (2, 2)
        assert await agrees(served)
        assert (await client.run_once()).outcome == "worked"
        assert await agrees(served)


async def test_a_round_that_the_other_took_away_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lookup = SlowLookup(monkeypatch)
    async with three_rounds() as (served, run, _):
        rollback = asyncio.create_task(served.steering.roll_back(run, 2, "one person"))
        await lookup.done.wait()
        await served.steering.roll_back(run, 1, "another person")
        lookup.go_on.set()
        with pytest.raises(ProblemError, match="the run has done 1 rounds, not 2"):
            await rollback
        assert (run.state.round, run.state.rollbacks) == (1, 1)
        assert await agrees(served)


async def test_rounds_that_end_meanwhile_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    lookup = SlowLookup(monkeypatch)
    async with three_rounds() as (served, run, client):
        rollback = asyncio.create_task(served.steering.roll_back(run, 2, "one person"))
        await lookup.done.wait()
        assert (await client.run_once()).outcome == "worked"
        lookup.go_on.set()
        await rollback
        assert (run.state.round, run.state.rollbacks) == (2, 1)
        assert await agrees(served)
