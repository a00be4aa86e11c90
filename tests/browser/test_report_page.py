"""axe-core on the report and on every state of the dashboard; neither asks the network."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedone_sdk.reports.pages import html_report
from tests.browser.axe import SEVERE, looks, overflow, violations
from tests.browser.stage import DESKTOP, Chromium, needs_chromium
from tests.browser.states import STATES, walk
from tests.integration.test_reports import hostile
from tests.integration.tuned import small

pytestmark = [needs_chromium, pytest.mark.asyncio(loop_scope="session")]


async def test_axe_finds_nothing_and_the_page_fits(chromium: Chromium, tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text(html_report((await small()).run), encoding="utf-8")
    found = []
    # It asserts at its end that nothing but these files was asked for.
    async with chromium.watching(tmp_path.as_uri()) as watcher:
        await watcher.visit("report.html")
        page = watcher.page
        async for look in looks(page):
            found += [(look, one) for one in await violations(page)]
            assert await overflow(page) == 0, look
        assert await page.evaluate("document.querySelector('img').naturalWidth") > 0
    assert found == []


async def test_hostile_text_does_nothing(chromium: Chromium, tmp_path: Path) -> None:
    run = hostile((await small()).run)
    (tmp_path / "report.html").write_text(html_report(run), encoding="utf-8")
    said: list[str] = []
    async with chromium.watching(tmp_path.as_uri()) as watcher:
        watcher.page.on("dialog", lambda dialog: said.append(dialog.message))
        await watcher.visit("report.html")
        shown = await watcher.page.evaluate("document.querySelector('pre').textContent")
    assert shown == run.result.prompt.text
    assert said == []


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
