"""Makes the screenshots in docs/images/dashboard: the dashboard with a real run, in Chromium.

``PYTHONPATH=. .venv-test/bin/python scripts/dashboard_screenshots.py``
"""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

from PIL import Image
from playwright.async_api import Page

from tests.browser.stage import DESKTOP, PHONE, Chromium, browsing
from tests.browser.states import STATES, walk

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "images" / "dashboard"
WHOLE = ("run", "run-waiting", "run-ended", "run-unfit")
"""States whose screenshots on a desktop show the whole page, not only the window."""
WANTED = {
    ("light", DESKTOP): STATES,
    ("dark", DESKTOP): ("run",),
    ("light", PHONE): ("runs", "run", "run-raise"),
    ("dark", PHONE): ("sign-in", "run-disconnected", "run-ended"),
}
COLOURS = 256


async def take(page: Page, file: Path, *, whole: bool) -> None:
    """Save a screenshot of the page, in few colours."""
    data = await page.screenshot(full_page=whole, animations="disabled")
    with Image.open(io.BytesIO(data)) as picture:
        few = picture.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
        few.save(file, optimize=True)


async def take_all(chromium: Chromium) -> None:
    """Make the screenshots for each colour scheme and window size."""
    for (scheme, size), wanted in WANTED.items():
        async for name, page in walk(chromium, size=size, scheme=scheme):
            if name in wanted:
                form = ("-phone" if size == PHONE else "") + ("-dark" if scheme == "dark" else "")
                await take(
                    page, FOLDER / f"{name}{form}.png", whole=name in WHOLE and size == DESKTOP
                )


async def main() -> None:
    """Make all screenshots."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    async with browsing() as chromium:
        await take_all(chromium)


if __name__ == "__main__":
    asyncio.run(main())
