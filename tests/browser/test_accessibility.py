"""axe-core on every state of the dashboard."""

from __future__ import annotations

from itertools import product

import pytest
from axe_playwright_python.async_playwright import Axe

from tests.browser.stage import DESKTOP, PHONE, Chromium, needs_chromium
from tests.browser.states import STATES, walk

pytestmark = [needs_chromium, pytest.mark.asyncio(loop_scope="session")]

SEVERE = ("serious", "critical")


async def test_no_state_has_a_serious_violation(chromium: Chromium) -> None:
    """In light and dark, on a desktop and on a phone."""
    axe, seen, found = Axe(), [], []
    async for name, page in walk(chromium, size=DESKTOP, scheme="light"):
        seen.append(name)
        for (width, height), scheme in product((DESKTOP, PHONE), ("light", "dark")):
            await page.set_viewport_size({"width": width, "height": height})
            await page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
            results = await axe.run(page, options={"resultTypes": ["violations"]})
            found += [
                (name, width, scheme, violation["id"], node["html"], node["failureSummary"])
                for violation in results.response["violations"]
                if violation["impact"] in SEVERE
                for node in violation["nodes"]
            ]
        await page.set_viewport_size({"width": DESKTOP[0], "height": DESKTOP[1]})
    assert found == []
    assert tuple(seen) == STATES
