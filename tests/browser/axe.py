"""Findings of axe-core on a page, in light and dark, on a desktop and on a phone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import product
from typing import NamedTuple

from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Page

from tests.browser.stage import DESKTOP, PHONE

SEVERE = ("serious", "critical")


class Look(NamedTuple):
    """How a page is shown."""

    width: int
    scheme: str


class Violation(NamedTuple):
    """A rule that an element breaks."""

    impact: str
    rule: str
    html: str
    summary: str


async def looks(page: Page) -> AsyncIterator[Look]:
    """Shows a page in every way that people see it."""
    for (width, height), scheme in product((DESKTOP, PHONE), ("light", "dark")):
        await page.set_viewport_size({"width": width, "height": height})
        await page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
        yield Look(width, scheme)


async def violations(page: Page, **options: object) -> list[Violation]:
    """Findings of axe-core on the current page, with more of its options."""
    results = await Axe().run(page, options={"resultTypes": ["violations"], **options})
    return [
        Violation(found["impact"], found["id"], node["html"], node["failureSummary"])
        for found in results.response["violations"]
        for node in found["nodes"]
    ]


async def overflow(page: Page) -> int:
    """By how many pixels a page is wider than the window: what is wide scrolls in its own box."""
    found: int = await page.evaluate(
        "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    )
    return found
