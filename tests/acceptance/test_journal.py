"""A server killed with -9 at a write of its journal: the run ends as without the kill.

The quick form of ``python -m tests.chaos.servers``.
"""

from __future__ import annotations

import pytest

from tests.chaos import servers
from tests.chaos.servers import databases_of
from tests.postgres import Cluster


@pytest.mark.parametrize("name", servers.SCENARIOS)
async def test_killed_at_some_points(name: str) -> None:
    figures = await servers.kill_at_writes(servers.SCENARIOS[name], numbers=range(2, 30, 7))
    assert figures.violations == []
    assert figures.acknowledged_updates_lost == 0
    assert figures.runs == figures.runs_as_without_kills >= 8
    assert figures.updates_acknowledged > 0


async def test_killed_at_some_points_on_postgres(postgres: Cluster) -> None:
    figures = await servers.kill_at_writes(
        servers.SCENARIOS["losses"], numbers=range(3, 30, 9), databases=databases_of(postgres)
    )
    assert figures.violations == []
    assert figures.runs == figures.runs_as_without_kills >= 4


async def test_killed_at_random_moments() -> None:
    figures = await servers.kill_at_moments(4, first_seed=0, jobs=2)
    assert figures.violations == []
    assert figures.kills >= 4
    assert figures.runs_as_without_kills == figures.runs
