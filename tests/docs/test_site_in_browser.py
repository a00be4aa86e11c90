"""The site in real Chromium, from the disk: accessible, searchable, offline."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import expect

from tests.browser.axe import SEVERE, looks, overflow, violations
from tests.browser.stage import Chromium, browsing, needs_chromium

pytestmark = [needs_chromium, pytest.mark.asyncio(loop_scope="session")]

PAGES = (
    "docs/index.html",
    "docs/quickstart.html",
    "docs/guides/reports.html",
    "docs/operations/dashboard.html",
    "docs/operations/serve.html",
    "docs/reference/run-yaml.html",
    "docs/tutorials/paid-api.html",
    "docs/explanation/algorithm.html",
    "docs/reference/api/fedone_sdk.client.html",
    "docs/reference/errors.html",
)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def chromium() -> AsyncIterator[Chromium]:
    """A started browser."""
    async with browsing() as found:
        yield found


@pytest.mark.parametrize("name", PAGES)
async def test_axe_finds_nothing_serious_and_the_page_fits(
    chromium: Chromium, site: Path, name: str
) -> None:
    found = []
    # It asserts at its end that nothing but the site's files was asked for.
    async with chromium.watching(site.as_uri()) as watcher:
        await watcher.visit(name)
        page = watcher.page
        async for look in looks(page):
            # Without preload: Chromium lets no script read style sheets from the disk.
            broken = await violations(page, preload=False)
            found += [(look, one) for one in broken if one.impact in SEVERE]
            assert await overflow(page) == 0, look
    assert found == []


async def test_run_yaml_fits_a_phone(chromium: Chromium, site: Path) -> None:
    async with chromium.watching(site.as_uri()) as watcher:
        page = watcher.page
        await page.set_viewport_size({"width": 360, "height": 740})
        await watcher.visit("docs/reference/run-yaml.html")
        beyond = "(all) => all.filter((one) => one.scrollWidth > one.clientWidth + 1).length"
        assert await page.locator("pre").count() > 5
        assert await page.locator("pre").evaluate_all(beyond) == 0


async def test_search_finds_a_page_without_a_server(chromium: Chromium, site: Path) -> None:
    async with chromium.watching(site.as_uri()) as watcher:
        await watcher.visit("docs/index.html")
        await watcher.page.get_by_role("textbox", name="Search").fill("clients_per_round")
        await watcher.page.keyboard.press("Enter")
        results = watcher.page.locator("#search-results")
        await expect(results.get_by_role("link", name="RUN.yaml").first).to_be_visible()
