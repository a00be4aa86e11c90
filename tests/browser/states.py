"""Every state of the dashboard, one after the other, on a real run."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator

from playwright.async_api import Page, Route, expect

from tests.browser.stage import OPERATOR, VIEWER, Chromium, Stage

STATES = (
    "sign-in",
    "sign-in-refused",
    "runs-empty",
    "run-waiting",
    "run-loading",
    "run",
    "run-values",
    "run-stop",
    "run-raise",
    "run-model-away",
    "run-viewer",
    "run-disconnected",
    "run-stopped",
    "run-ended",
    "run-unfit",
    "runs",
    "not-found",
    "no-page",
    "unreachable",
)
"""Their names, in the order of `walk`."""

RUN = "#/runs/sentiment"
ENDED = "Completed|Budget used up"
URGENCY = {
    "template": "{prompt} {text} It was {mask}.",
    "labels": {"low": " terrible", "high": " great"},
}


async def walk(
    chromium: Chromium, *, size: tuple[int, int], scheme: str
) -> AsyncIterator[tuple[str, Page]]:
    """Brings a page from state to state.

    Yields:
        The state's name, and the page that is in it.
    """
    async with Stage() as stage, chromium.watching(stage.url, size=size, scheme=scheme) as watcher:
        page = watcher.page
        main = page.get_by_role("main")
        await watcher.visit()
        await expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
        yield "sign-in", page
        await page.get_by_label("Token", exact=True).fill("a-wrong-token")
        await page.get_by_role("button", name="Sign in").click()
        await expect(page.get_by_role("alert")).to_contain_text("does not know this token")
        yield "sign-in-refused", page
        await watcher.sign_in(OPERATOR)
        await expect(main).to_contain_text("No runs yet")
        yield "runs-empty", page

        await stage.add_run("intents", rounds=6)
        stage.start_devices(2)
        await stage.reach(6, "intents")
        await stage.rest()
        await stage.add_run("sentiment")
        await page.get_by_role("link", name="sentiment").click()
        await expect(main).to_contain_text("Waiting for the first client")
        yield "run-waiting", page

        stage.start_devices(5)
        stage.start_quitter(3)
        await stage.reach(34)
        release = asyncio.Event()

        async def late(route: Route) -> None:
            await release.wait()
            await route.continue_()

        await page.route("**/v1/runs/sentiment/seats", late)
        await page.reload()
        await expect(main).to_contain_text("Loading the run")
        yield "run-loading", page
        release.set()
        await expect(page.get_by_role("figure", name="Loss over queries")).to_be_visible()
        await expect(main).to_contain_text("Round 35 in progress")
        # Lost work is grouped by its reason.
        await expect(page.get_by_role("region", name="Errors")).to_contain_text("3 times")
        yield "run", page

        loss = page.get_by_role("figure", name="Loss over queries")
        await loss.get_by_text("Values").click()
        await expect(loss.get_by_role("row")).to_have_count(35)
        yield "run-values", page
        await loss.get_by_text("Values").click()
        await page.get_by_role("button", name="Stop", exact=True).click()
        await expect(page.get_by_role("dialog")).to_be_visible()
        yield "run-stop", page
        await page.get_by_role("button", name="Keep running").click()
        await page.get_by_role("button", name="Raise caps").click()
        await expect(page.get_by_role("dialog")).to_be_visible()
        yield "run-raise", page
        await page.keyboard.press("Escape")
        stage.trouble = "the key is not accepted"
        notice = page.get_by_text("The model is not available at the moment.")
        await expect(notice).to_be_visible()
        yield "run-model-away", page
        stage.trouble = None
        await expect(notice).to_be_hidden()

        await page.get_by_role("button", name="Sign out").click()
        await watcher.sign_in(VIEWER, RUN)
        await expect(main).to_contain_text("Only operators can stop and resume runs")
        await expect(main).to_contain_text("Round 35 in progress")
        yield "run-viewer", page
        await page.get_by_role("button", name="Sign out").click()
        await watcher.sign_in(OPERATOR, RUN)
        await expect(main).to_contain_text("Round 35 in progress")

        await stage.shut()
        await expect(page.get_by_text("Connection lost")).to_be_visible()
        yield "run-disconnected", page
        await stage.open()
        await page.get_by_role("button", name="Try now").click()
        await expect(page.get_by_text("Connection lost")).to_be_hidden()

        await page.get_by_role("button", name="Stop", exact=True).click()
        await page.get_by_role("button", name="Stop the run").click()
        await expect(page.get_by_role("button", name="Resume")).to_be_visible()
        yield "run-stopped", page
        await page.get_by_role("button", name="Resume").click()
        await expect(page.get_by_role("button", name="Stop", exact=True)).to_be_visible()
        stage.start_devices(3)  # All runs had ended: the others have gone home.
        await stage.reach(60)
        await expect(page.get_by_role("heading", level=1)).to_contain_text(re.compile(ENDED))
        worth = page.get_by_role("region", name="Was it worth it?")
        await expect(worth).to_contain_text("One answer for everything", timeout=15_000)
        yield "run-ended", page

        await stage.add_run("urgency", task=URGENCY)
        stage.start_devices(3)
        await watcher.visit("#/runs/urgency")
        await expect(main).to_contain_text("fit: field 'label' is none of: ")
        yield "run-unfit", page
        await page.get_by_role("link", name="Runs").click()
        await expect(page.get_by_role("row")).to_have_count(4)
        yield "runs", page
        await watcher.visit("#/runs/nothing")
        await expect(page.get_by_role("alert")).to_contain_text("There is no such resource")
        yield "not-found", page
        await watcher.visit("#/nothing/here")
        await expect(page.get_by_role("heading", name="There is no such page")).to_be_visible()
        yield "no-page", page
        await watcher.visit("#/")
        await expect(page.get_by_role("row")).to_have_count(4)
        await stage.shut()
        # The page itself comes from the server, too; what it has is what a tab had before.
        await page.evaluate("location.hash = '#/runs/sentiment'")
        await expect(page.get_by_role("alert")).to_contain_text("cannot be reached")
        yield "unreachable", page
