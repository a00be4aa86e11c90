"""The `Aggregator`: a service, its store and its HTTP server, started and stopped together."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from typing import Self

import structlog
from pydantic import SecretStr

from fedone_sdk.aggregator.authority import AdminToken, Authority, EnrolmentToken
from fedone_sdk.aggregator.http.application import build_app, build_metrics_app, listening
from fedone_sdk.aggregator.http.guards import NO_LIMITS, NO_ORIGINS, CorsConfig, Limits
from fedone_sdk.aggregator.replicas import Retention
from fedone_sdk.aggregator.runs.changes import Feed
from fedone_sdk.aggregator.runs.served_run import ServedRun
from fedone_sdk.aggregator.service import KEEP_ALL, Service
from fedone_sdk.aggregator.telemetry import NO_OBSERVERS, Observers
from fedone_sdk.algorithms import load_method
from fedone_sdk.backends import LLMBackend
from fedone_sdk.clock import Clock, SystemClock
from fedone_sdk.errors import SpecError
from fedone_sdk.messages import RunEvent, RunResult
from fedone_sdk.metrics import MetricFunction
from fedone_sdk.spec import RunSpec, validate_spec
from fedone_sdk.spec.base import check_kinds
from fedone_sdk.stores import MemoryStore, Store
from fedone_sdk.task import Example, ScoreFunction
from fedone_sdk.vocabulary import Vocabulary

_log = structlog.get_logger(__name__)


class Aggregator:
    """Serves tuning runs to edge clients over HTTP.

    Example:
        ```python
        async with Aggregator(backend=OnnxBackend(), enrolment_tokens=[token]) as aggregator:
            url = await aggregator.listen(port=8080)
            run = await aggregator.add_run(spec)
            result = await run.wait()
            print(result.prompt.text)
        ```

    Args:
        backend: The gateway's model, which the caller closes; None if clients use their own models.
        store: Store of runs and clients. The default store is in memory: a restart loses runs,
            clients and the record of what was spent.
        enrolment_tokens: Tokens that devices enrol with: secrets, or `EnrolmentToken` with limits.
        admin_token: Token of a user in role admin. Without `admin_token` and `admin_tokens`, the
            users' routes are closed (``forbidden``).
        admin_tokens: Tokens of other users, with their roles.
        limits: Rate limits of callers; none by default.
        cors: Origins of web pages that may take part as devices; none by default.
        drain_s: Time that pending requests have to finish when the server stops, seconds.
        retention: How long ended runs, logs and idle clients are kept; for ever by default.
    """

    def __init__(
        self,
        *,
        backend: LLMBackend | None = None,
        store: Store | None = None,
        enrolment_tokens: Iterable[str | EnrolmentToken] = (),
        admin_token: str | SecretStr | None = None,
        admin_tokens: Iterable[AdminToken] = (),
        limits: Limits = NO_LIMITS,
        cors: CorsConfig = NO_ORIGINS,
        clock: Clock | None = None,
        observers: Observers = NO_OBSERVERS,
        drain_s: float = 1.0,
        retention: Retention = KEEP_ALL,
    ) -> None:
        tokens = {
            "enrolment_tokens": enrolment_tokens,
            "admin_token": admin_token,
            "admin_tokens": admin_tokens,
        }
        if not isinstance(store, Store | None):
            kind = type(store).__name__  # A URL may contain a password.
            problem = f"store: is {kind}; it must be a Store, such as SqlStore.sqlite(path)"
            raise SpecError(problem, source="Aggregator")
        check_kinds(
            "Aggregator",
            backend=(backend, LLMBackend | None),
            limits=(limits, Limits),
            cors=(cors, CorsConfig),
            clock=(clock, Clock | None),
            observers=(observers, Observers),
            retention=(retention, Retention),
        )
        self._is_default_store = store is None
        self.service = Service(
            store=store or MemoryStore(),
            clock=clock or SystemClock(),
            authority=validate_spec(Authority, tokens, source="Aggregator"),
            backend=backend,
            retention=retention,
            observe_commit=observers.commit,
        )
        self._limits = limits
        self._cors = cors
        self._observers = observers
        self._drain_s = drain_s
        self._stack = AsyncExitStack()
        if observers.metrics is not None:
            observers.metrics.watch(self.service)

    def __repr__(self) -> str:
        """Return the number of runs, and whether a restart would lose them."""
        in_memory = isinstance(self.service.store, MemoryStore)
        lost = ", store in memory: not durable" if in_memory else ""
        return f"Aggregator({len(self.service.runs)} runs served{lost})"

    async def __aenter__(self) -> Self:
        try:
            await self.open()
            await self.admit_devices()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def open(self) -> None:
        """Open the store, and start to load the stored runs that are running or paused.

        ``async with`` calls this and `admit_devices`. To listen while runs are loaded, call `open`,
        `listen`, `admit_devices` and, at the end, `__aexit__` instead.
        """
        if self._is_default_store:
            _log.warning(
                "the store is in memory: a restart loses runs, clients and spending; "
                "pass store=SqlStore.sqlite(path) to keep them"
            )
        self._stack.push_async_callback(self.service.stop)
        await self.service.open()

    async def admit_devices(self) -> None:
        """Wait until the stored runs are loaded, then admit devices.

        Raises:
            StoreUnavailable: The store is not available.
        """
        await self.service.wait_until_loaded()
        self.service.admit_devices()

    async def __aexit__(self, *_: object) -> None:
        self.drain()
        # Stops in reverse order: the HTTP servers, then the service, which closes the store.
        await self._stack.aclose()

    def drain(self) -> None:
        """Begin the shutdown. ``/readyz`` returns 503; long polls and event streams end."""
        self.service.drain()

    async def listen(
        self, *, host: str = "127.0.0.1", port: int = 0, ssl_context: ssl.SSLContext | None = None
    ) -> str:
        """Start to accept requests, over HTTPS if there is an `ssl_context`; return the base URL.

        Port 0 selects a free port.
        """
        return await self._stack.enter_async_context(
            listening(
                build_app(
                    self.service, observers=self._observers, limits=self._limits, cors=self._cors
                ),
                host=host,
                port=port,
                ssl_context=ssl_context,
                grace_s=self._drain_s,
                limits=self._limits,
                # A device that disconnects must lose its long poll and its place in the pool.
                handler_cancellation=True,
            )
        )

    async def listen_metrics(self, *, host: str = "127.0.0.1", port: int = 0) -> str:
        """Serve ``/metrics`` on its own port, without a token.

        Raises:
            ValueError: The observers have no metrics.
        """
        if self._observers.metrics is None:
            raise ValueError("there are no metrics to serve")
        app = build_metrics_app(self._observers.metrics)
        return await self._stack.enter_async_context(listening(app, host=host, port=port))

    async def add_run(
        self,
        spec: RunSpec,
        vocabulary: Vocabulary | None = None,
        *,
        dev: Sequence[Example] = (),
        score: ScoreFunction | None = None,
        measure: MetricFunction | None = None,
        proposer: LLMBackend | None = None,
    ) -> RunHandle:
        """Add a run under its spec's name, or continue the stored run of this name.

        Args:
            spec: The run. A method of your own (``method.name: own``) is imported.
            vocabulary: The candidates. By default they are built from `spec.prompt`, with files
                relative to the working directory. Candidates that depend on training texts must be
                built before the call (`PromptSpec.build`).
            dev: Held-out examples to measure prompts on.
            score: Your score function, for loss ``score``.
            measure: Your metric function, for a custom metric.
            proposer: The backend of ``prompt.proposer``; without it, no new candidates are written.

        Raises:
            BackendError: The model is not available.
            DataError: The candidates cannot be built, or a row of `dev` does not fit the task.
            LabelWordError: A label word is not one token of the model.
            SpecError: The run cannot work, or its name is taken by a different run.
        """
        check_kinds(
            "add_run",
            spec=(spec, RunSpec),
            vocabulary=(vocabulary, Vocabulary | None),
            score=(score, Callable | None),
            measure=(measure, Callable | None),
            proposer=(proposer, LLMBackend | None),
        )
        load_method(spec.method)
        run = await self.service.add_run(
            spec, vocabulary, dev=dev, score=score, measure=measure, proposer=proposer
        )
        return RunHandle(self.service, run)


class RunHandle:
    """A run of an aggregator in this program."""

    def __init__(self, service: Service, run: ServedRun) -> None:
        self.run_id = run.run_id
        self._service = service
        self._run = run

    def result(self) -> RunResult:
        """Return the current or final result."""
        return self._run.result()

    async def wait_ended(self) -> None:
        """Wait until the run has ended, but not until its final prompt is measured."""
        await self._run.ended.wait()

    async def wait(self) -> RunResult:
        """Return the result once the run has ended and its final prompt is measured.

        A run that is stopped, paused or failed counts as ended until it is resumed. If the
        aggregator stops, the result is returned at once, with the run's status.
        """
        await self._service.wait(self._run)
        return self.result()

    async def stop(self, reason: str | None = None) -> RunResult:
        """Stop the run, and return the result of the rounds so far.

        Raises:
            ProblemError: ``run_conflict`` if the run has ended already.
        """
        await self._service.stop_run(self._run, reason)
        return self.result()

    async def events(self) -> AsyncIterator[RunEvent]:
        """Stream a report of each round, from the first round on, then the result.

        The report of a round is sent again when its metric is known.

        Example:
            ```python
            async for event in run.events():
                print(event.mean_loss if isinstance(event, RoundReport) else event.status)
            ```
        """
        with Feed(self._run, self._service.listeners) as feed:
            while True:
                for report in feed.take():
                    yield report
                if self._service.draining or not (self._run.state.running or feed.has_more):
                    break
                await feed.wait()
            result = await self.wait()
            for report in feed.take():
                yield report
            yield result
