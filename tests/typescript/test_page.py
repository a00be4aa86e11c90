"""A page in Chromium as a device: it enrols, continues after a reload, and needs its origin."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from playwright.async_api import Page, expect

from fedone_sdk.aggregator import Aggregator, ServedRun
from fedone_sdk.aggregator.http.application import listening
from fedone_sdk.aggregator.http.guards import CorsConfig
from fedone_sdk.backends import Query
from fedone_sdk.testing import ScriptedBackend
from tests.browser.stage import Chromium, needs_chromium
from tests.typescript.test_fleets import GS_BDPL, WORDS, rows_of, spec_of

pytestmark = [pytest.mark.typescript, needs_chromium, pytest.mark.asyncio(loop_scope="session")]

TOKEN = "enrolment-token-of-the-page"
SPEC = spec_of({"participation": {"exchange": "losses"}, "method": GS_BDPL, "rounds": 6})


@asynccontextmanager
async def page_of(rows: Sequence[dict[str, Any]], *folders: Path) -> AsyncIterator[str]:
    """The address of a page with these rows and folders, on a separate server."""
    app = web.Application()

    async def file(request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        if name == "rows.json":
            return web.json_response(rows)
        found = [folder / name for folder in folders if (folder / name).is_file()]
        return web.FileResponse(found[0]) if found else web.Response(status=204)

    app.router.add_get("/{name}", file)
    async with listening(app) as url:
        yield url


def demo_page(package: Path) -> AbstractAsyncContextManager[str]:
    return page_of(rows_of(SPEC, 0), package / "demo", package / "dist" / "page")


@asynccontextmanager
async def serving(
    *origins: str, held_after: int = 100
) -> AsyncIterator[tuple[str, ServedRun, asyncio.Event]]:
    """An aggregator's address and run; its model stops to answer after some queries."""
    answering = asyncio.Event()

    async def gate(query: Query) -> None:
        if len(model.asked) > held_after:
            await answering.wait()

    model = ScriptedBackend(gate=gate)
    cors = CorsConfig(origins=origins)
    async with Aggregator(backend=model, enrolment_tokens=[TOKEN], cors=cors) as aggregator:
        run = await aggregator.service.add_run(SPEC, WORDS)
        yield await aggregator.listen(), run, answering


async def take_part(page: Page, url: str, token: str) -> None:
    await page.get_by_label("Server").fill(url)
    await page.get_by_label("Token").fill(token)
    await page.get_by_role("button").click()


async def test_a_page_takes_part(chromium: Chromium, package: Path) -> None:
    async with (
        asyncio.timeout(60),
        demo_page(package) as pages,
        serving(pages, held_after=11) as (url, run, answering),
        chromium.watching(pages, also=url) as watcher,
    ):
        page: Any = watcher.page
        await watcher.visit("page.html")
        await take_part(page, url, TOKEN)
        while run.state.round < 2:
            await asyncio.sleep(0.01)
        # A reload during work: it is the same device, which needs no token any more.
        await watcher.visit("page.html")
        answering.set()
        await take_part(page, url, "")
        await expect(page.get_by_role("status")).to_contain_text("ended")
        assert "enrolled" not in await page.get_by_role("status").inner_text()
    result = run.result()
    assert (result.status, result.rounds) == ("completed", 6)
    assert len({one.client_id for one in result.history}) == 1
