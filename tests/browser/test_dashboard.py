"""The dashboard in a real Chromium, with a real aggregator and real clients."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio
from playwright.async_api import Locator, Page, expect

from fedone_sdk.aggregator.rounds.run_state import Lineage
from fedone_sdk.budget import Budget
from tests.browser.axe import overflow
from tests.browser.stage import DESKTOP, OPERATOR, PHONE, VIEWER, Chromium, Stage, needs_chromium

pytestmark = [needs_chromium, pytest.mark.asyncio(loop_scope="session")]


@pytest_asyncio.fixture(loop_scope="session")
async def stage() -> AsyncIterator[Stage]:
    async with Stage() as found:
        yield found


def tile(page: Page, name: str) -> Locator:
    return page.locator(".tiles > div").filter(has=page.get_by_text(name, exact=True))


async def painted(page: Page, chart: str) -> str:
    """What is drawn in a chart."""
    canvas = page.get_by_role("figure", name=chart).locator("canvas")
    found: str = await canvas.evaluate("(canvas) => canvas.toDataURL()")
    return found


async def test_a_run_starts_and_its_charts_move(chromium: Chromium, stage: Stage) -> None:
    async with chromium.watching(stage.url) as watcher:
        page = watcher.page
        await watcher.sign_in(VIEWER)
        await expect(page.get_by_text("No runs yet")).to_be_visible()
        run = await stage.add_run()
        await page.get_by_role("link", name="sentiment").click()
        await expect(page.get_by_text("Waiting for the first client")).to_be_visible()

        stage.start_devices()
        await stage.reach(12)
        await expect(tile(page, "Rounds")).to_contain_text("12of 60 planned")
        charts = ("Loss over queries", "Metric over queries", "Queries left over rounds")
        before = [await painted(page, chart) for chart in charts]
        loss = page.get_by_role("figure", name=charts[0])
        await expect(loss).to_contain_text(f"Round {run.history[11].mean_loss:.3f}")

        await stage.reach(25)
        await expect(tile(page, "Rounds")).to_contain_text("25of 60 planned")
        # The round that is held may have sent its 8 queries.
        await expect(tile(page, "Queries")).to_contain_text(re.compile("20[08]of 440"))
        await expect(loss).to_contain_text(f"Round {run.history[24].mean_loss:.3f}")
        after = [await painted(page, chart) for chart in charts]
        assert all(old != new for old, new in zip(before, after, strict=True))
        # Twice: once for those who cannot see the chart.
        forecast = page.get_by_text(re.compile("the queries are used up after round 5[45] of 60"))
        await expect(forecast).to_have_count(2)
        chips = [token.replace(" ", "␣") or "∅" for token in run.result().prompt.tokens]
        await expect(page.locator(".chip")).to_have_text(chips)
        heat = page.get_by_role("region", name="Token probabilities by position")
        await expect(heat.get_by_role("row")).to_have_count(9)
        alpha = run.state.method.alpha
        share = 100 * float(alpha[0].max() / alpha[0].sum())
        await expect(heat.get_by_role("row").nth(1)).to_contain_text(f"{share:.0f} %")
        metric = next(report.metric for report in run.history[::-1] if report.metric is not None)
        await expect(tile(page, "Metric")).to_contain_text(f"{metric:.3f}")


async def test_an_ended_run_has_a_verdict(chromium: Chromium, stage: Stage) -> None:
    stage.backend.inner.bounds -= {"usd"}
    run = await stage.add_run(rounds=6)
    async with chromium.watching(stage.url, size=PHONE) as watcher:
        page = watcher.page
        await watcher.sign_in(VIEWER, "#/runs/sentiment")
        worth = page.get_by_role("region", name="Was it worth it?")
        await expect(worth).to_be_hidden()
        stage.start_devices()
        stage.answering.set()
        await stage.rest()
        await stage.aggregator.service.wait(run)
        verdict = run.result().verdict
        assert verdict is not None
        await expect(worth).to_contain_text(verdict.text[1:], timeout=15_000)
        prompts = worth.get_by_role("region", name="Prompts on the dev rows").get_by_role("row")
        await expect(prompts).to_have_count(1 + len(verdict.standings))
        for place, one in enumerate(verdict.standings, 1):
            assert one.value is not None
            await expect(prompts.nth(place)).to_contain_text(f"{one.value:.4f}"[:4])
        fair = next(one for one in verdict.standings if one.name == verdict.against)
        assert fair.gain is not None
        await expect(tile(page, "Metric")).to_contain_text(re.compile("over (no|a) (prompt|label)"))
        # A price that is not known is not 0.
        await expect(page.get_by_text("unknown: the model has no known price")).to_be_visible()
        assert await overflow(page) == 0


async def test_runs_are_compared_side_by_side(chromium: Chromium, stage: Stage) -> None:
    runs = [await stage.add_run(name, rounds=6) for name in ("sentiment", "other")]
    async with chromium.watching(stage.url, size=PHONE) as watcher:
        page = watcher.page
        await watcher.sign_in(VIEWER)
        figure = page.get_by_role("figure", name="Metric of several runs")
        stage.start_devices()
        stage.answering.set()
        await stage.rest()
        for run in runs:
            await stage.aggregator.service.wait(run)
            assert run.summary.metric is not None
            await expect(figure).to_contain_text(
                f"{run.run_id} {run.summary.metric:.3f}", timeout=15_000
            )
        assert await overflow(page) == 0


async def test_an_operator_stops_and_resumes(chromium: Chromium, stage: Stage) -> None:
    run = await stage.add_run()
    stage.start_devices()
    await stage.reach(3)
    async with chromium.watching(stage.url) as watcher:
        page = watcher.page
        await watcher.sign_in(OPERATOR, "#/runs/sentiment")
        await page.get_by_role("button", name="Stop", exact=True).click()
        await page.get_by_role("button", name="Stop the run").click()
        await expect(page.get_by_role("heading", level=1)).to_contain_text("Stopped")
        assert run.state.status == "stopped"
        await expect(page.get_by_role("button", name="Resume")).to_be_focused()
        await page.get_by_role("button", name="Resume").click()
        await expect(page.get_by_role("heading", level=1)).to_contain_text("Running")
        assert run.state.running
        stage.start_devices()  # All runs had ended: the others have gone home.
        await stage.reach(6)
        # The stream is followed again.
        await expect(tile(page, "Rounds")).to_contain_text("6of 60")
        await page.get_by_role("button", name="Raise caps").click()
        await page.get_by_role("spinbutton", name="queries").fill("480")
        await page.get_by_role("button", name="Raise", exact=True).click()
        await expect(tile(page, "Queries")).to_contain_text("of 480")
        assert run.state.account.cap == Budget(queries=480, requests=1500)


async def test_the_keyboard_is_enough(chromium: Chromium, stage: Stage) -> None:
    run = await stage.add_run()
    async with chromium.watching(stage.url) as watcher:
        page = watcher.page
        await watcher.visit("#/runs/sentiment")
        await expect(page.get_by_label("Token", exact=True)).to_be_focused()
        await page.keyboard.type(OPERATOR)
        await page.keyboard.press("Enter")
        stop = page.get_by_role("button", name="Stop", exact=True)
        await expect(stop).to_be_visible()
        for _ in range(8):
            await page.keyboard.press("Tab")
            if await stop.evaluate("(node) => node === document.activeElement"):
                break
        await expect(stop).to_be_focused()
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("dialog", name="Stop sentiment?")).to_be_visible()
        await page.keyboard.press("Escape")
        await expect(page.get_by_role("dialog")).to_be_hidden()
        await expect(stop).to_be_focused()
        assert run.state.running


async def test_a_viewer_cannot_stop(chromium: Chromium, stage: Stage) -> None:
    run = await stage.add_run()
    async with chromium.watching(stage.url) as watcher:
        page = watcher.page
        await watcher.sign_in(VIEWER, "#/runs/sentiment")
        await expect(
            page.get_by_text("Only operators can stop and resume runs, and raise caps")
        ).to_be_visible()
        for name in ("Stop", "Resume"):
            await expect(page.get_by_role("button", name=name)).to_have_count(0)
        # Nor by asking for what the page does not offer.
        status = await page.evaluate(
            """async () => {
                const Authorization = `Bearer ${sessionStorage.getItem("fedone.token")}`;
                const options = { method: "POST", headers: { Authorization } };
                return (await fetch("v1/runs/sentiment/stop", options)).status;
            }"""
        )
        assert status == 403
        assert run.state.running


async def test_the_token_stays_in_its_tab(chromium: Chromium, stage: Stage) -> None:
    async with chromium.watching(stage.url) as watcher:
        page = watcher.page
        await watcher.sign_in(VIEWER)
        await page.reload()
        await expect(page.get_by_text("vincent")).to_be_visible()
        kept = await page.evaluate(
            "[Object.values(sessionStorage), Object.values(localStorage), document.cookie]"
        )
        assert kept == [[VIEWER], [], ""]
        assert VIEWER not in "".join(watcher.requested)
        other = await page.context.new_page()
        await other.goto(stage.url)
        await expect(other.get_by_role("heading", name="Sign in")).to_be_visible()
        await page.get_by_role("button", name="Sign out").click()
        await expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
        assert await page.evaluate("sessionStorage.length") == 0


async def test_text_from_a_device_stays_text(chromium: Chromium, stage: Stage) -> None:
    await stage.add_run()
    attack = "<img src=x onerror=document.title='taken'>"
    stage.start_quitter(1, reason=attack)
    stage.start_devices(2)
    async with chromium.watching(stage.url) as watcher:
        page = watcher.page
        await watcher.sign_in(OPERATOR, "#/runs/sentiment")
        await stage.reach(8)
        await expect(page.get_by_text(attack).first).to_be_visible()
        await expect(page.locator("main img")).to_have_count(0)
        assert await page.title() == "sentiment · FedOne"


@pytest.mark.parametrize("size", [PHONE, (320, 640), DESKTOP], ids=["phone", "narrow", "desktop"])
async def test_nothing_is_wider_than_the_window(
    chromium: Chromium, stage: Stage, size: tuple[int, int]
) -> None:
    await stage.add_run("a-run-with-a-rather-long-name-that-somebody-has-chosen")
    await stage.add_run()
    stage.start_devices(3)
    await stage.reach(10)
    async with chromium.watching(stage.url, size=size) as watcher:
        page = watcher.page
        await watcher.sign_in(OPERATOR)
        await expect(page.get_by_role("link", name="sentiment")).to_be_visible()
        too_wide = "document.documentElement.scrollWidth - innerWidth"
        assert await page.evaluate(too_wide) <= 0
        await page.get_by_role("link", name="sentiment").click()
        await expect(tile(page, "Rounds")).to_contain_text("10of 60")
        assert await page.evaluate(too_wide) <= 0


async def test_the_forecast(chromium: Chromium, stage: Stage) -> None:
    """Numbers of a run of 8 queries a round, one round of which was lost."""
    async with chromium.watching(stage.url) as watcher:
        await watcher.visit()
        found = await watcher.page.evaluate(
            """async () => {
                const { burnDown, outlook, pace, secondsLeft, smooth } =
                    await import("./dashboard/forecast.js");
                const rounds = [0, 1, 2, 3].map((round) => ({ round, queries: 8 }));
                return {
                    burnt: burnDown(rounds, 100, 40),
                    none: burnDown([], 100, 0),
                    pace: [pace(rounds), pace([])],
                    short: outlook(4, 20, 60, 8),
                    enough: outlook(4, 10, 60, 8),
                    still: outlook(0, 10, 60, 0),
                    seconds: [secondsLeft(4, 11, 20), secondsLeft(0, 10, 0)],
                    smooth: smooth([1, 2, 1], 0.5),
                };
            }"""
        )
    assert found == {
        "burnt": {"x": [0, 1, 2, 3, 4], "left": [100, 92, 84, 76, 60]},
        "none": {"x": [0], "left": [100]},
        "pace": [8, 0],
        "short": {"round": 11, "left": 4, "enough": False},
        "enough": {"round": 10, "left": 12, "enough": True},
        "still": {"round": 10, "left": 60, "enough": True},
        "seconds": [35, None],
        "smooth": [1, 1.5, 1.25],
    }


async def test_the_list_has_what_users_look_for(chromium: Chromium, stage: Stage) -> None:
    run = await stage.add_run()
    stage.start_devices(3)
    await stage.reach(10)
    async with chromium.watching(stage.url) as watcher:
        page = watcher.page
        await watcher.sign_in(VIEWER)
        cells = page.get_by_role("row").filter(has_text="sentiment").locator("td[data-title]")
        await expect(cells.nth(1)).to_have_text("3 devices")
        await expect(cells.nth(2)).to_have_text("just now")
        await expect(cells.nth(3)).to_contain_text("requests")
        metric = run.summary.metric
        assert metric is not None
        await expect(cells.nth(0)).to_have_text(f"{metric:.3f}accuracy")


async def test_what_devices_wrote_is_a_tree(chromium: Chromium, stage: Stage) -> None:
    run = await stage.add_run(
        task={"template": "{line} {text} It was {mask}.", "labels": {0: " terrible", 1: " great"}},
        prompt={
            "slots": [{"name": "line", "candidates": ["", "Judge."]}],
            "proposer": {"kind": "reflection"},
        },
        method={"name": "thompson", "num_samples": 8, "batch_size": 6},
    )
    texts = ("Judge the end.", "Judge the end <b>twice</b>.")
    lineage = (Lineage(texts[0], 3, (0,)), Lineage(texts[1], None, (2, 1)))
    proposed = tuple(("line", text) for text in texts)
    run.state = replace(run.state, proposed=proposed, lineage=lineage)
    run._on_new_state()
    async with chromium.watching(stage.url) as watcher:
        await watcher.sign_in(VIEWER, "#/runs/sentiment")
        table = watcher.page.get_by_role("region", name="Candidates written from failures")
        rows = table.locator("tbody tr")
        await expect(rows.nth(0)).to_contain_text(f"{texts[0]}3\u2013(blank)")
        second = f"\u2003{texts[1]}merged\u2013{texts[0]} + Judge."
        await expect(rows.nth(1)).to_contain_text(second)
