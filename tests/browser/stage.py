"""A real aggregator with real clients, and a real Chromium on its dashboard."""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import re
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import aiohttp
import pytest
from playwright.async_api import Browser, BrowserContext, Page, async_playwright
from pydantic import SecretStr

from fedone_sdk import EdgeClient
from fedone_sdk.aggregator import Aggregator, ServedRun
from fedone_sdk.aggregator.authority import AdminToken
from fedone_sdk.aggregator.rounds import RoundMachine
from fedone_sdk.backends import Query, Wrapper
from fedone_sdk.spec import RunSpec
from fedone_sdk.stores import MemoryStore
from fedone_sdk.task import Rendered
from fedone_sdk.testing import ScriptedBackend
from fedone_sdk.vocabulary import Vocabulary
from tests.processes import PATIENCE_S
from tests.runs import until

ENROLMENT = "enrolment-token-of-the-stage"
OPERATOR, VIEWER = "operator-token-2e", "viewer-token-3d"
DESKTOP, PHONE = (1280, 900), (390, 844)

WORDS = Vocabulary(
    candidates=(
        *(" honestly", " overall", " verdict", " feeling", " review", " opinion", " really"),
        *(" customer", " says", " product", " quality", " rating", " summary", " think", " it"),
        *(" device", " simply", " about", " what", " tone", " mood", " stars", " fair", ""),
    )
)
SENTENCES = [{"text": f"Sentence {number}.", "label": number % 2} for number in range(240)]
DEV, TRAIN = SENTENCES[:48], SENTENCES[48:]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

needs_chromium = pytest.mark.skipif(
    CHROMIUM is None and os.environ.get("CI") != "true",
    reason="there is no chromium here; scripts/install-chromium installs it on Debian",
)


def spec_of(name: str, **changes: Any) -> RunSpec:
    """A run of 60 rounds with 8 queries each, under a cap that ends it before."""
    document: dict[str, Any] = {
        "name": name,
        "task": {
            "template": "{prompt} {text} It was {mask}.",
            "labels": {0: " terrible", 1: " great"},
        },
        "prompt": {"length": 8, "vocabulary": {"kind": "list", "candidates": ["a", "b"]}},
        "method": {"name": "random", "num_samples": 8, "batch_size": 6},
        "participation": {"exchange": "losses", "deadline_s": 600},
        "budget": {"queries": 440, "requests": 1500},
        "rounds": 60,
        "evaluation": {"every": 5, "examples": 48},
        "seed": 4,
    }
    return RunSpec.model_validate({**document, **changes})


def hashed(text: str) -> float:
    """A number from -1 to 1 that stands for the text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") / 2**31 - 1


def number_of(inputs: Rendered) -> int:
    """Which of the sentences it is; 0 of none, as when the model is looked at."""
    text = "".join(part.text for part in inputs if part.kind == "field")
    return int(re.sub(r"\D", "", text) or 0)


def opinion(inputs: Rendered, label_words: Sequence[str]) -> tuple[float, ...]:
    """A model that answers the better, the better the words of its prompt are."""
    prompt = "".join(part.text for part in inputs if part.kind == "prompt")
    number = number_of(inputs)
    worth = 0.4 + sum(hashed(word) for word in prompt.split()) / 4
    logit = worth * (1 if number % 2 else -1) + 2.6 * hashed(f"sentence {number}")
    return tuple(-math.log1p(math.exp(-sign * logit)) for sign in (-1, 1))


class Quitter:
    """A device that takes work and gives it back, over plain HTTP."""

    def __init__(self, url: str) -> None:
        self.url = url

    async def work(self, times: int, reason: str) -> None:
        """Enrols, and gives work back so many times."""
        async with aiohttp.ClientSession(self.url) as session:
            async with session.post("/v1/clients", json={}, headers=_bearer(ENROLMENT)) as response:
                headers = _bearer((await response.json())["credential"])
            claim = {"num_examples": 20, "wait_s": 20}
            while times:
                async with session.post(
                    "/v1/assignments/claim", json=claim, headers=headers
                ) as response:
                    if response.status == 410:
                        return
                    if response.status != 200:
                        continue
                    path = f"/v1/assignments/{(await response.json())['assignment_id']}/decline"
                decline = {"reason": reason}
                async with session.post(path, json=decline, headers=headers) as response:
                    assert response.status == 204
                times -= 1


def _bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


class _Troubled(Wrapper):
    """The model of a stage, with the trouble that it has."""

    def __init__(self, stage: Stage, inner: ScriptedBackend) -> None:
        super().__init__(inner)
        self._stage = stage

    @property
    def trouble(self) -> str | None:
        return self._stage.trouble


class Stage:
    """An aggregator on loopback, and devices; the model answers while `answering` is set.

    Attributes:
        answering: Holds the model back while it is clear.
        backend: The model.
        trouble: Why the model is not asked, if it is not.
        url: Where the aggregator listens.
        aggregator: The one that listens now.
    """

    def __init__(self) -> None:
        self.answering = asyncio.Event()
        self.trouble: str | None = None
        self.url = ""
        self.aggregator: Aggregator
        self.backend = _Troubled(self, ScriptedBackend(opinion, gate=self._gate))
        self._store = MemoryStore()
        self._served = AsyncExitStack()
        self._specs: list[RunSpec] = []
        self._devices: list[asyncio.Task[None]] = []
        self._until: tuple[str, int] | None = None

    async def __aenter__(self) -> Stage:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.answering.set()
        for device in self._devices:
            device.cancel()
        await asyncio.gather(*self._devices, return_exceptions=True)
        await self._served.aclose()

    async def open(self) -> None:
        """Starts to serve; after `shut` what it served then, at the same address."""
        port = int(self.url.rpartition(":")[2]) if self.url else 0
        people = [
            AdminToken(token=SecretStr(OPERATOR), name="olga", role="operator"),
            AdminToken(token=SecretStr(VIEWER), name="vincent", role="viewer"),
        ]
        RoundMachine.CLAIM_TIMEOUT_S = 1.0
        self.aggregator = await self._served.enter_async_context(
            Aggregator(
                backend=self.backend,
                store=self._store,
                enrolment_tokens=[ENROLMENT],
                admin_tokens=people,
            )
        )
        for spec in self._specs:
            await self._add(spec)
        self.url = await self.aggregator.listen(port=port)

    async def shut(self) -> None:
        """Ends the server and all its connections, as a restart does."""
        await self._served.aclose()

    async def add_run(self, name: str = "sentiment", **changes: Any) -> ServedRun:
        """Adds a run."""
        spec = spec_of(name, **changes)
        self._specs.append(spec)
        return await self._add(spec)

    async def _add(self, spec: RunSpec) -> ServedRun:
        dev = DEV if 0 in spec.task.labels or "0" in spec.task.labels else ()
        words = spec.prompt.build(spec.task) if spec.prompt.slots else WORDS
        return await self.aggregator.service.add_run(spec, words, dev=dev)

    def start_devices(self, number: int = 4) -> None:
        """Edge clients that work on until the stage is over."""
        for index in range(number):
            rows = TRAIN[20 * index : 20 * index + 20]
            self._devices.append(asyncio.create_task(self._work(rows)))

    async def _work(self, rows: list[dict[str, Any]]) -> None:
        async with EdgeClient(self.url, token=ENROLMENT, data=rows) as client:
            await client.run_forever()

    async def rest(self) -> None:
        """Return when all devices have exited, as they do when all runs have ended."""
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*self._devices)

    def start_quitter(self, times: int = 6, reason: str = "the battery is low") -> None:
        """A device that gives its work back."""
        self._devices.append(asyncio.create_task(Quitter(self.url).work(times, reason)))

    def run(self, run_id: str = "sentiment") -> ServedRun:
        """A run as the aggregator has it that listens now."""
        return self.aggregator.service.runs[run_id]

    async def reach(self, rounds: int, run_id: str = "sentiment") -> None:
        """Lets the model answer until so many rounds are done, and holds it then."""
        self._until = run_id, rounds
        self.answering.set()
        await until(lambda: not self._runs_on(run_id, rounds), timeout_s=PATIENCE_S)
        self.answering.clear()
        self._until = None

    def _runs_on(self, run_id: str, rounds: int) -> bool:
        state = self.run(run_id).state
        return state.running and state.round < rounds

    async def _gate(self, query: Query) -> None:
        if self._until is not None and not self._runs_on(*self._until):
            self.answering.clear()
        if number_of(query.inputs[0]) >= len(DEV):  # Evaluation is never held back.
            await self.answering.wait()


class Watcher:
    """A browser's page, and what went wrong in it.

    Attributes:
        page: The page.
        errors: Exceptions and messages of the console; answers that are no success are none.
        requested: Addresses that it asked for.
    """

    def __init__(self, page: Page, url: str) -> None:
        self.page, self.url = page, url
        self.errors: list[str] = []
        self.requested: list[str] = []
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self.requested.append(request.url))
        page.on(
            "console",
            lambda message: (
                self.errors.append(message.text)
                if message.type in ("error", "warning")
                and not message.text.startswith("Failed to load resource")
                else None
            ),
        )

    async def visit(self, path: str = "") -> None:
        """Opens an address of the dashboard."""
        await self.page.goto(f"{self.url}/{path}")

    async def sign_in(self, token: str = OPERATOR, path: str = "") -> None:
        """Comes in as a person does."""
        await self.visit(path)
        await self.page.get_by_label("Token", exact=True).fill(token)
        await self.page.get_by_role("button", name="Sign in").click()
        await self.page.get_by_role("button", name="Sign out").wait_for()


class Chromium:
    """A started browser, from which pages are opened."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser

    @asynccontextmanager
    async def watching(
        self,
        url: str,
        *,
        also: str | None = None,
        size: tuple[int, int] = DESKTOP,
        scheme: str = "light",
    ) -> AsyncIterator[Watcher]:
        """A page in a separate session; its errors are raised at the end.

        Args:
            url: Where it lies, and all that it may ask for.
            also: Another address that it may ask.
            size: Of the window, pixels.
            scheme: ``light`` or ``dark``.
        """
        context: BrowserContext = await self._browser.new_context(
            viewport={"width": size[0], "height": size[1]},
            color_scheme="dark" if scheme == "dark" else "light",
            reduced_motion="reduce",
            has_touch=size == PHONE,
        )
        try:
            watcher = Watcher(await context.new_page(), url)
            watcher.page.set_default_timeout(15_000)
            yield watcher
            assert watcher.errors == []
            expected = (url, also or url, f"blob:{url}")
            assert [each for each in watcher.requested if not each.startswith(expected)] == []
        finally:
            with suppress(Exception):
                await context.close()


@asynccontextmanager
async def browsing() -> AsyncIterator[Chromium]:
    """A headless Chromium, Debian's."""
    if CHROMIUM is None:
        raise RuntimeError("there is no chromium; run scripts/install-chromium")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            # As root in a container there is no sandbox to be had.
            executable_path=CHROMIUM,
            args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"],
        )
        try:
            yield Chromium(browser)
        finally:
            await browser.close()
