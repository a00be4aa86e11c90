"""Devices that are killed or lose power at a write, a message or a query.

It draws noise once for each work, pays once for what it has kept, sends an update again byte for
byte, and its count of epsilon never goes down. The quick form of ``python -m tests.chaos.devices``.
"""

from __future__ import annotations

import os

import pytest

from tests.chaos import devices
from tests.chaos.devices import Death

pytest.importorskip("dp_accounting")
pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")


@pytest.mark.parametrize("name", devices.SCENARIOS)
async def test_one_death(name: str) -> None:
    moments = range(5, 150, 12)
    deaths = [Death(at, kind) for at in moments for kind in ("nothing", "half")]
    figures = await devices.campaign(devices.SCENARIOS[name], deaths)
    assert figures.violations == []
    assert figures.deaths == len(deaths)


async def test_a_kill_and_a_power_cut_after_it() -> None:
    """A new process syncs what a killed one has written before it relies on it."""
    scenario = devices.SCENARIOS["alpha, own model, noise on alpha"]
    figures = devices.Figures()
    for first in range(90, 240, 10):
        for second in (18, 30, 60):
            deaths = [Death(first, "kill"), Death(second, "nothing")]
            await devices.add(figures, scenario, deaths)
    assert figures.violations == []
    assert figures.deaths >= 40
