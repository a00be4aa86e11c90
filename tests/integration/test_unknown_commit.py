"""Commits with an unknown outcome."""

from __future__ import annotations

from typing import Any

import pytest

from fedone_sdk.errors import StoreUnavailable
from fedone_sdk.stores import Commit, MemoryStore
from tests.integration.test_edge_resume import WORDS, spec_of
from tests.runs import serving


class Vague(MemoryStore):
    """Disconnect during a commit, before it is stored or after."""

    goes_away: str | None = None

    async def commit(self, run_id: str, version: int, commit: Commit) -> None:
        away, self.goes_away = self.goes_away, None
        if away != "before":
            await super().commit(run_id, version, commit)
        if away is not None:
            raise StoreUnavailable("the connection broke")


def traffic(run: Any) -> tuple[int, int, int, int]:
    result = run.result()
    found = result.communication
    return found.upload_bytes, found.download_bytes, found.messages, result.cache.hits


@pytest.mark.parametrize("away", ["before", "after"])
async def test_its_counters_are_added_once(away: str) -> None:
    store = Vague()
    async with serving(store=store) as served:
        run = await served.add_run(spec_of("losses"), WORDS)
        before = traffic(run)
        run.count_traffic(700, 30, gateway=False)
        store.goes_away = away
        with pytest.raises(StoreUnavailable):
            await run.record_metric(0, 0.5)
        run.count_traffic(7, 3, gateway=False)
        wanted = (before[0] + 707, before[1] + 33, before[2] + 4, 0)
        assert traffic(run) == wanted
        await run.catch_up()
        assert traffic(run) == wanted
        await run.record_metric(0, 0.5)
        assert traffic(run) == wanted
    # And the store says the same.
    async with serving(store=store) as again:
        assert traffic(again.runs["run"]) == wanted


async def test_a_run_that_others_moved_on_counts_nothing_twice() -> None:
    """The author of the commit can no longer be determined."""
    store = Vague()
    async with serving(store=store) as served:
        run = await served.add_run(spec_of("losses"), WORDS)
        before = traffic(run)
        run.count_traffic(700, 30, gateway=False)
        store.goes_away = "after"
        with pytest.raises(StoreUnavailable):
            await run.record_metric(0, 0.5)
        record = await store.run("run")
        assert record is not None
        await store.commit("run", record.version, Commit(document=record.document))
        await run.catch_up()
        assert traffic(run) == (before[0] + 700, before[1] + 30, before[2] + 2, 0)
