"""Takes the pictures of the dashboard in docs/images/dashboard, of a real run in real Chromium.

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
"""States of which a desktop shows the whole page, not what fits into the window."""
WANTED = {
    ("light", DESKTOP): STATES,
    ("dark", DESKTOP): ("run",),
    ("light", PHONE): ("runs", "run", "run-raise"),
    ("dark", PHONE): ("sign-in", "run-disconnected", "run-ended"),
}
COLOURS = 256


async def take(page: Page, file: Path, *, whole: bool) -> None:
    """Keep what the page shows, in few colours."""
    data = await page.screenshot(full_page=whole, animations="disabled")
    with Image.open(io.BytesIO(data)) as picture:
        few = picture.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
        few.save(file, optimize=True)


async def take_all(chromium: Chromium) -> None:
    """Walk through the states in each form of the page."""
    for (scheme, size), wanted in WANTED.items():
        async for name, page in walk(chromium, size=size, scheme=scheme):
            if name in wanted:
                form = ("-phone" if size == PHONE else "") + ("-dark" if scheme == "dark" else "")
                await take(
                    page, FOLDER / f"{name}{form}.png", whole=name in WHOLE and size == DESKTOP
                )


async def main() -> None:
    """Take all pictures."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    async with browsing() as chromium:
        await take_all(chromium)


if __name__ == "__main__":
    asyncio.run(main())
