"""axe-core on every state of the dashboard."""

from __future__ import annotations

import pytest

from tests.browser.axe import SEVERE, looks, violations
from tests.browser.stage import DESKTOP, Chromium, needs_chromium
from tests.browser.states import STATES, walk

pytestmark = [needs_chromium, pytest.mark.asyncio(loop_scope="session")]


async def test_no_state_has_a_serious_violation(chromium: Chromium) -> None:
    """In light and dark, on a desktop and on a phone."""
    seen, found = [], []
    async for name, page in walk(chromium, size=DESKTOP, scheme="light"):
        seen.append(name)
        async for look in looks(page):
            found += [(name, look, one) for one in await violations(page) if one.impact in SEVERE]
        await page.set_viewport_size({"width": DESKTOP[0], "height": DESKTOP[1]})
    assert found == []
    assert tuple(seen) == STATES
