"""What a library really sends: each request once, and seen as it came back."""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any

__all__ = ["SentTwice", "Wire", "wire"]

_CLIENTS = ("httpx", "httpx2")
# These print addresses, headers and bodies at some level.
_LOGGERS = ("LiteLLM", "openai._base_client", *_CLIENTS)


class SentTwice(RuntimeError):
    """A request that was paid for once was about to be sent again."""


@dataclass(slots=True)
class Wire:
    """What one call has sent.

    Attributes:
        sent: The addresses that something was sent to; questions (GET) do not count.
        response: The answer of the last of them, of `httpx`.
        failure: Why it did not answer.
    """

    sent: set[str] = field(default_factory=set)
    response: Any = None
    failure: Exception | None = None

    @contextmanager
    def sending(self, request: Any) -> Iterator[None]:
        """Lets a request go out.

        Raises:
            SentTwice: Something was sent to its address before.
        """
        if request.method == "GET":
            yield
            return
        address = f"{request.method} {request.url}"
        if address in self.sent:
            raise SentTwice("a request is sent once")
        self.sent.add(address)
        # Before it there may have been others: for a token, about the model.
        self.response = self.failure = None
        try:
            yield
        except Exception as exc:
            self.failure = exc
            raise

    def answered(self, request: Any, response: Any) -> Any:
        """Notes an answer."""
        if request.method != "GET":
            self.response = response
        return response


_wire: ContextVar[Wire | None] = ContextVar("fedone_wire", default=None)
_hooked: set[str] = set()
_lock = threading.Lock()


@contextmanager
def wire() -> Iterator[Wire]:
    """Watches what this task sends through `httpx`, and what it starts; others are let alone.

    LiteLLM may send a request again when its connection broke (``AsyncHTTPHandler.post``), and has
    no switch for that. It also reports broken connections and answers that are cut off as status
    500, and drops the headers of refusals. So what happened is seen where all of it passes. After
    an answer of Ollama's it asks for facts about the model, and the event loop would wait.
    """
    _hook()
    seen = Wire()
    token = _wire.set(seen)
    try:
        yield seen
    finally:
        _wire.reset(token)


def _hook() -> None:
    with _lock:
        for name in _CLIENTS:
            if name in _hooked or find_spec(name) is None:
                continue
            library = import_module(name)
            library.AsyncClient.send = _watched(library.AsyncClient.send)
            library.Client.send = _watched_sync(library.Client.send)
            _hooked.add(name)
        for name in _LOGGERS:
            logging.getLogger(name).addFilter(_not_ours)  # The same filter is added once.


def _on_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _not_ours(record: logging.LogRecord) -> bool:
    return _wire.get() is None


def _watched(send: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    @functools.wraps(send)
    async def watched(client: Any, request: Any, **options: Any) -> Any:
        seen = _wire.get()
        if seen is None:
            return await send(client, request, **options)
        with seen.sending(request):
            return seen.answered(request, await send(client, request, **options))

    return watched


def _watched_sync(send: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(send)
    def watched(client: Any, request: Any, **options: Any) -> Any:
        seen = _wire.get()
        if seen is None:
            return send(client, request, **options)
        if _on_a_loop():
            raise RuntimeError("the event loop does not wait for this")
        with seen.sending(request):
            return seen.answered(request, send(client, request, **options))

    return watched
