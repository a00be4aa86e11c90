"""The Aggregator: the service, its store and its HTTP server as one thing to start and stop."""

from __future__ import annotations

import ssl
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from fedone_sdk.aggregator.auth import Authority
from fedone_sdk.aggregator.http import listening
from fedone_sdk.aggregator.routes import build_app
from fedone_sdk.aggregator.run import ServedRun
from fedone_sdk.aggregator.service import Service
from fedone_sdk.backends import LLMBackend
from fedone_sdk.clock import Clock, SystemClock
from fedone_sdk.spec import RunSpec
from fedone_sdk.stores import MemoryStore, Store
from fedone_sdk.task import Example, ScoreFunction
from fedone_sdk.vocabulary import Vocabulary

__all__ = ["Aggregator"]


class Aggregator:
    """Serves tuning runs to edge clients over HTTP.

    Example:
        ```python
        async with Aggregator(backend=OnnxBackend(), enrolment_tokens=[token]) as aggregator:
            url = await aggregator.listen(port=8080)
            run = await aggregator.add_run(spec, vocabulary)
            await aggregator.wait(run)
            print(run.result().prompt.text)
        ```

    Args:
        backend: The gateway's model; None when clients bring their own. Stays the caller's.
        store: Keeps runs and clients; in memory by default.
        enrolment_tokens: Secrets that let a device enrol.
        admin_token: Secret that lets a person steer runs over HTTP; None shuts these routes.
        clock: Tells the time.
    """

    def __init__(
        self,
        *,
        backend: LLMBackend | None = None,
        store: Store | None = None,
        enrolment_tokens: Iterable[str] = (),
        admin_token: str | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.service = Service(
            store=store or MemoryStore(),
            clock=clock or SystemClock(),
            authority=Authority(enrolment_tokens=enrolment_tokens, admin_token=admin_token),
            backend=backend,
        )
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self.service.start()
        self._stack.push_async_callback(self.service.stop)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # In reverse: no new requests, then the service, then the store.
        await self._stack.aclose()

    async def listen(
        self, *, host: str = "127.0.0.1", port: int = 0, ssl_context: ssl.SSLContext | None = None
    ) -> str:
        """Starts to accept requests.

        Args:
            host: Address to listen on.
            port: 0 picks a free one.
            ssl_context: Serves ``https``.

        Returns:
            The base URL.
        """
        return await self._stack.enter_async_context(
            listening(
                build_app(self.service),
                host=host,
                port=port,
                ssl_context=ssl_context,
                # A device that hangs up must not keep its long poll, nor its place among those
                # available.
                handler_cancellation=True,
            )
        )

    async def add_run(
        self,
        spec: RunSpec,
        vocabulary: Vocabulary,
        *,
        dev: Sequence[Example] = (),
        score: ScoreFunction | None = None,
    ) -> ServedRun:
        """Adds a run under its spec's name, or takes up the stored one.

        Args:
            spec: The run.
            vocabulary: Its candidates.
            dev: Held-out examples to measure prompts on.
            score: The user's function that measures them, for loss ``score``.

        Raises:
            SpecError: The run cannot work, or its name is taken by a different run.
            LabelWordError: A label word is not one token of the model.
        """
        return await self.service.add_run(spec, vocabulary, dev=dev, score=score)

    async def wait(self, run: ServedRun) -> None:
        """Returns when the run has ended and its last prompt was measured."""
        await self.service.wait(run)
