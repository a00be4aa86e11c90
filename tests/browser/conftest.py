"""One Chromium for all browser tests."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.browser.stage import Chromium, browsing


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def chromium() -> AsyncIterator[Chromium]:
    """A started browser; each test opens its own pages."""
    async with browsing() as found:
        yield found
