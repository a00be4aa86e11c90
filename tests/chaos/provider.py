"""A provider that counts what it is asked against a cap, at every request."""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from types import TracebackType
from typing import Any, Self

from fedone_sdk.budget import NOTHING, Budget, Price, Usage
from tests.fake_openai import FakeModel, FakeOpenAI, Received, Script

MODEL = "fake-1"
LABELS = (" terrible", " great")
PRICE = Price(prompt=Decimal(5), completion=Decimal(15))

ERRORS: Mapping[str, float] = {
    "rate_limited:0": 0.02,
    "rate_limited_ms:5": 0.02,
    "error": 0.03,
    "error:502": 0.01,
    "overloaded": 0.01,
    "reset": 0.03,
    "truncated": 0.02,
    "slow_body:0.0001": 0.03,
    "no_usage": 0.05,
    "filtered": 0.01,
}
"""What goes wrong, and how often."""

GOOD = frozenset({"ok", "slow_body", "no_usage"})
"""What brings an answer that was paid for."""

# Fewer tokens than are shown: no log-probability is a bound, and answers tell texts apart.
_TOKENS = (*LABELS, " the", " film", " a", " very", " so", " and", ".", "!")


def _is_news(record: logging.LogRecord) -> bool:
    # Who is killed while it sends leaves half a request behind.
    return record.exc_info is None or not isinstance(record.exc_info[1], ConnectionResetError)


logging.getLogger("aiohttp.server").addFilter(_is_news)


@dataclass(frozen=True)
class _Announcing(Script):
    """A script that tells of each request by its number when it comes."""

    tell: Callable[[int], None] = field(default=lambda _: None)

    def pick(self, number: int, text: str = "") -> str:
        self.tell(number)
        return super().pick(number, text)


class Provider:
    """The scripted server, with totals and a cap on requests, tokens and money that it watches.

    Attributes:
        overshoot: One line for each request beyond the cap.
    """

    def __init__(
        self,
        *,
        cap: Budget | None = None,
        chances: Mapping[str, float] | None = None,
        seed: int = 0,
        latency_s: float = 0.0,
        on_request: Callable[[int], None] | None = None,
    ) -> None:
        self.cap = cap
        self.on_request = on_request
        self.overshoot: list[str] = []
        self._model = FakeModel(_TOKENS)
        self._counted = 0
        self._total = NOTHING
        self._server = FakeOpenAI(
            script=_Announcing(chances=dict(chances or {}), seed=seed, tell=self._told),
            models={MODEL: {}},
            model=self._model,
            latency_s=latency_s,
        )

    @property
    def base_url(self) -> str:
        return self._server.base_url

    @property
    def received(self) -> list[Received]:
        """Every request, in the order in which they came."""
        return self._server.received

    async def __aenter__(self) -> Self:
        await self._server.start()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._server.stop()

    def total(self) -> Usage:
        """All that was received by now, as the provider bills it."""
        for received in self.received[self._counted :]:
            self._counted += 1
            self._total += PRICE.priced(
                Usage(
                    requests=1,
                    prompt_tokens=received.prompt_tokens,
                    completion_tokens=received.completion_tokens,
                )
            )
            if self.cap is None:
                continue
            for unit, cap, amount in self.cap.pairs(self._total):
                if unit != "queries" and amount > cap:
                    self.overshoot.append(f"request {received.number}: {amount} {unit} of {cap}")
        return self._total

    def values(self, received: Received) -> tuple[float, ...]:
        """The labels' log-probabilities that this request's answer brings, as an SDK keeps them."""
        row = self._model.log_probs(text_of(received))
        return tuple(struct.unpack("<f", struct.pack("<f", row[label]))[0] for label in LABELS)

    def _told(self, number: int) -> None:
        self.total()
        if self.on_request is not None:
            self.on_request(number)


def text_of(received: Received) -> str:
    """What a request asks about."""
    body: dict[str, Any] = received.body
    if "messages" in body:
        return "".join(message["content"] for message in body["messages"])
    return str(body["prompt"])
