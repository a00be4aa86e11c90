"""The edge client: it enrols, asks for work, scores prompts on its own data, returns updates."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import ssl
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import structlog
import tenacity

from fedone_sdk.backends.base import LLMBackend
from fedone_sdk.budget import NOTHING
from fedone_sdk.client.identity import StateFolder, Unsent
from fedone_sdk.client.scoring import (
    BeforeSend,
    Declining,
    Losses,
    Minibatch,
    backend_losses,
    gateway_losses,
    usable,
)
from fedone_sdk.client.transport import HttpTransport, Idle, Transport
from fedone_sdk.data.minibatch import draw_minibatch
from fedone_sdk.errors import (
    BackendError,
    DataError,
    MissingExtraError,
    ProblemError,
    SpecError,
    TransportError,
    is_retryable,
)
from fedone_sdk.messages import (
    UPDATE,
    AlphaAssignment,
    AlphaUpdate,
    Array,
    Claim,
    Decline,
    Enrol,
    LossesAssignment,
    LossesUpdate,
    RunTask,
    Scored,
)
from fedone_sdk.task import Example, ScoreFunction

__all__ = ["EdgeClient", "Outcome"]

_log = structlog.get_logger(__name__)

Examples = Iterable[Example]
Data = Examples | AsyncIterable[Example] | Callable[[], "Examples | Awaitable[Examples]"]

Outcome = Literal["worked", "declined", "refused", "idle", "ended"]
"""What one turn came to."""

_NOT_DECLINED = ("assignment_expired", "run_conflict")
"""Refusals that leave nothing to give back: the work is gone, or kept while the run is paused."""

_GATEWAY_ATTEMPTS = 5
_MAX_EXAMPLES = 100_000
_MAX_WAIT_S = 120.0
"""The longest that a server's ``Retry-After`` is honoured, seconds."""
_JITTER = tenacity.wait_random_exponential(multiplier=0.2, max=20)

T = TypeVar("T")


class EdgeClient:
    """A device that takes part in prompt tuning with its own labelled text.

    Example:
        ```python
        async with EdgeClient("https://fedone.example", token=token, data=examples) as client:
            await client.run_forever()
        ```

    Through the gateway (the default) the texts of a mini-batch leave the device; `before_send`
    sees each of them first. Labels never do, but for the loss ``nll``: its reference texts are
    what the model is asked about, and pass `before_send` too.

    Args:
        server: Base URL of the aggregator.
        token: Enrolment token; needed until the device has an identity.
        data: The examples: an iterable; an async iterator, read as it yields; or a callable
            (plain or async) that is asked for the current examples before each piece of work.
        backend: A model of the device's own; None scores through the gateway.
        score: ``score(generated, example)`` from 0 to 1, for runs whose loss is ``score``.
        before_send: Sees every text before it is scored; returns it, a redacted form, or None to
            hold the example back. Plain or async.
        state_dir: Folder that keeps the identity across restarts; None forgets it.
        name: What people may call this device.
        run_id: Work only for this run.
        wait_s: How long a request for work may stay open, seconds.
        ssl_context: Trust for ``https``.
        transport: How to reach the aggregator; HTTP by default.
    """

    def __init__(
        self,
        server: str,
        *,
        token: str | None = None,
        data: Data,
        backend: LLMBackend | None = None,
        score: ScoreFunction | None = None,
        before_send: BeforeSend | None = None,
        state_dir: str | Path | None = None,
        name: str | None = None,
        run_id: str | None = None,
        wait_s: float = 25.0,
        ssl_context: ssl.SSLContext | None = None,
        transport: Transport | None = None,
    ) -> None:
        self._server = server
        self._token = token
        self._backend = backend
        self._score = score
        self._before_send = before_send
        self._name = name
        self._run_id = run_id
        self._wait_s = wait_s
        self._transport = transport or HttpTransport(server, ssl_context=ssl_context)
        self._state = None if state_dir is None else StateFolder(state_dir)
        self._credential = None if self._state is None else self._state.credential(server)
        self._source = data
        self._examples: list[Example] = []
        self._reader: asyncio.Task[None] | None = None
        self._tasks: dict[str, RunTask] = {}
        self._vocabularies: dict[str, tuple[str, ...]] = {}
        self._memories: dict[str, bytes] = {}
        self._stopping = asyncio.Event()
        if not callable(data) and not isinstance(data, AsyncIterable):
            self._examples = list(data)
            if not self._examples:
                raise DataError("data: this client has no examples; it needs at least one")

    async def __aenter__(self) -> Self:
        if isinstance(self._source, AsyncIterable):
            self._reader = asyncio.create_task(
                self._read(aiter(self._source)), name="edge client data"
            )
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        await self._transport.aclose()

    # Turns

    async def run_forever(self) -> None:
        """Works until the aggregator says that its runs have ended, or `stop` is called.

        The aggregator may restart or be out of reach meanwhile; the client asks again.

        Raises:
            ProblemError: The aggregator does not know this device, and it has no token to enrol.
        """
        while not self._stopping.is_set():
            # Only `stop` ends the patience with a server that cannot be reached; work that an
            # outage has broken off is asked for again.
            with contextlib.suppress(TransportError):
                if await self.run_once() == "ended":
                    return

    def stop(self) -> None:
        """Asks `run_forever` to return; work under way is finished first."""
        self._stopping.set()

    async def enrol(self) -> None:
        """Makes sure that this device has an identity; asking for work does so by itself.

        Raises:
            ProblemError: The token is not valid.
            SpecError: There is neither an identity nor a token.
        """
        if self._credential is not None:
            return
        token = self._token
        if token is None:
            raise SpecError("token: is required until the device has enrolled", source="arguments")
        enrolled = await self._persist(lambda: self._transport.enrol(token, Enrol(name=self._name)))
        self._credential = enrolled.credential
        if self._state is not None:
            self._state.keep_credential(self._server, enrolled.credential)

    async def run_once(self) -> Outcome:
        """Asks for work once, and does it.

        Returns:
            ``worked`` when an update was accepted, ``declined`` when the work was given back,
            ``refused`` when the update came too late or did not fit, ``idle`` when there was no
            work, ``ended`` when there will be none.
        """
        await self.enrol()
        await self._hand_in_unsent()
        held = await self._held_examples()
        if not held:
            await self._pause(self._wait_s)
            return "idle"
        message = Claim(num_examples=len(held), wait_s=self._wait_s, run_id=self._run_id)
        try:
            claimed = await self._unless_stopping(
                self._persist(lambda: self._transport.claim(self._credential or "", message))
            )
        except ProblemError as exc:
            if exc.code == "run_ended":
                return "ended"
            if exc.code == "unauthorized" and self._token is not None:
                # The server has lost its clients, or revoked this one: enrol as a new one.
                self._forget()
                return "idle"
            raise
        if claimed is None:
            return "idle"
        if isinstance(claimed, Idle):
            await self._pause(claimed.retry_after_s)
            return "idle"
        return await self._work(claimed, held)

    def _forget(self) -> None:
        self._credential = None
        if self._state is not None:
            self._state.keep_credential(self._server, None)

    async def _work(
        self, assignment: AlphaAssignment | LossesAssignment, held: Sequence[Example]
    ) -> Outcome:
        log = _log.bind(run_id=assignment.run_id, round=assignment.round)
        renewing = asyncio.create_task(self._renew(assignment), name="edge client renewal")
        try:
            try:
                run = await self._task(assignment.run_id)
                if run.task.loss == "score" and self._score is None:
                    raise Declining("loss score needs a score function, and this client has none")
                examples = [example for example in held if usable(run.task, example)]
                if not examples:
                    raise Declining("none of this client's examples fits the task")
                update: AlphaUpdate | LossesUpdate
                memory = b""  # in the losses exchange the server remembers
                if isinstance(assignment, AlphaAssignment):
                    update, memory = await self._alpha_update(run, assignment, examples)
                else:
                    update = await self._losses_update(run, assignment, examples)
            except (Declining, BackendError, MissingExtraError, ProblemError, SpecError) as exc:
                if isinstance(exc, ProblemError) and exc.code in _NOT_DECLINED:
                    raise
                usage = exc.usage if isinstance(exc, Declining) else NOTHING
                log.warning("assignment declined", reason=str(exc))
                message = Decline(reason=str(exc)[:500], usage=usage)
                await self._persist(
                    lambda: self._transport.decline(
                        self._credential or "", assignment.assignment_id, message
                    )
                )
                return "declined"
            unsent = Unsent(
                run_id=assignment.run_id,
                assignment_id=assignment.assignment_id,
                update=update.model_dump_json(),
                memory=memory,
            )
            if self._state is not None:
                self._state.keep_unsent(unsent)
            return await self._hand_in(unsent, update)
        except ProblemError as exc:
            log.warning("work refused", code=exc.code, detail=exc.detail)
            return "refused"
        finally:
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)

    async def _hand_in_unsent(self) -> None:
        """Hands in what was finished before this device stopped: it was paid for."""
        unsent = None if self._state is None else self._state.unsent()
        if unsent is not None:
            with contextlib.suppress(ProblemError):
                await self._hand_in(unsent, UPDATE.validate_json(unsent.update))

    async def _hand_in(self, unsent: Unsent, update: AlphaUpdate | LossesUpdate) -> Outcome:
        """Returns finished work; sent again, it gets the same receipt.

        Raises:
            ProblemError: The server does not take it.
        """
        try:
            await self._persist(
                lambda: self._transport.update(self._credential or "", unsent.assignment_id, update)
            )
        except ProblemError:
            if self._state is not None:
                self._state.keep_unsent(None)
            raise
        if unsent.memory:
            self._keep_memory(unsent.run_id, unsent.memory)
        if self._state is not None:
            self._state.keep_unsent(None)
        return "worked"

    async def _renew(self, assignment: AlphaAssignment | LossesAssignment) -> None:
        """Keeps the seat while the work takes longer than its deadline allows."""
        while True:
            await asyncio.sleep(assignment.deadline_s / 2)
            with contextlib.suppress(ProblemError):
                await self._persist(
                    lambda: self._transport.renew(self._credential or "", assignment.assignment_id)
                )

    # Exchanges

    async def _losses_update(
        self, run: RunTask, assignment: LossesAssignment, examples: Sequence[Example]
    ) -> LossesUpdate:
        losses = await self._losses(
            run, assignment, examples, assignment.minibatch_seed, assignment.prompts
        )
        return LossesUpdate(
            num_examples=len(examples),
            scored=losses.scored,
            usage=losses.usage,
            model=losses.model,
            losses=losses.values,
        )

    async def _alpha_update(
        self, run: RunTask, assignment: AlphaAssignment, examples: Sequence[Example]
    ) -> tuple[AlphaUpdate, bytes]:
        try:
            from fedone_sdk.algorithms import (
                State,
                dump_memory,
                load_memory,
                method_from_spec,
                stream,
            )
            from fedone_sdk.messages.ndarray import (
                from_wire,
                memory_from_wire,
                memory_to_wire,
                to_wire,
            )
        except ImportError as exc:
            raise MissingExtraError("the alpha exchange", extra="alpha") from exc
        method = method_from_spec(
            run.method, prompt_len=run.prompt_len, vocab_size=run.vocab_size, blank=run.blank
        )
        # What a method remembers is the run's, and travels, or this client's, and stays.
        saved = None if method.shares_memory else self._memory(assignment.run_id)
        memory = load_memory(saved) if saved else memory_from_wire(assignment.memory)
        state = State(alpha=from_wire(assignment.alpha), memory=memory)
        usage, scored = NOTHING, Scored(scored=0)
        values: list[float] = []
        for step in assignment.steps:
            candidates = method.ask(state, stream(step.prompt_seed), step.num_samples)
            indices = candidates.indices
            try:
                losses = await self._losses(
                    run,
                    assignment,
                    examples,
                    step.minibatch_seed,
                    Array.of_indices(indices.ravel().tolist(), indices.shape, run.vocab_size),
                )
            except Declining as exc:
                raise Declining(exc.reason, usage + exc.usage) from exc
            state = method.tell(state, candidates, losses.values)
            usage += losses.usage
            scored += losses.scored
            values.extend(losses.values)
        update = AlphaUpdate(
            num_examples=len(examples),
            scored=scored,
            usage=usage,
            model=losses.model,
            alpha=to_wire(state.alpha),
            memory=memory_to_wire(state.memory) if method.shares_memory else {},
            mean_loss=sum(values) / len(values),
        )
        keep = bool(state.memory) and not method.shares_memory
        return update, dump_memory(state.memory) if keep else b""

    async def _losses(
        self,
        run: RunTask,
        assignment: AlphaAssignment | LossesAssignment,
        examples: Sequence[Example],
        minibatch_seed: int,
        prompts: Array,
    ) -> Losses:
        drawn = draw_minibatch(len(examples), run.method.batch_size, minibatch_seed)
        batch = await Minibatch.of(
            run.task, [examples[index] for index in drawn], self._before_send
        )
        if self._backend is not None:
            candidates = await self._vocabulary(assignment.run_id)
            texts = ["".join(candidates[int(index)] for index in row) for row in prompts.rows()]
            return await backend_losses(
                run.task, batch, prompts=texts, backend=self._backend, score=self._score
            )
        if not run.gateway:
            raise Declining("this server has no gateway, and the client has no backend")
        return await gateway_losses(
            run.task,
            batch,
            assignment_id=assignment.assignment_id,
            # The server knows the prompts that it drew itself.
            prompts=None if isinstance(assignment, LossesAssignment) else prompts,
            ask=lambda message: self._persist(
                lambda: self._transport.score(self._credential or "", message),
                attempts=_GATEWAY_ATTEMPTS,
            ),
            score=self._score,
        )

    # What is known of runs

    async def _task(self, run_id: str) -> RunTask:
        if run_id not in self._tasks:
            run = await self._persist(lambda: self._transport.task(self._credential or "", run_id))
            if self._backend is not None:
                await self._backend.check(run.task.label_words)
            self._tasks[run_id] = run
        return self._tasks[run_id]

    async def _vocabulary(self, run_id: str) -> tuple[str, ...]:
        if run_id not in self._vocabularies:
            message = await self._persist(
                lambda: self._transport.vocabulary(self._credential or "", run_id)
            )
            self._vocabularies[run_id] = message.candidates
        return self._vocabularies[run_id]

    def _memory(self, run_id: str) -> bytes | None:
        return self._memories.get(run_id) or (self._state.memory(run_id) if self._state else None)

    def _keep_memory(self, run_id: str, memory: bytes) -> None:
        if self._state is None:
            self._memories[run_id] = memory
        else:
            self._state.keep_memory(run_id, memory)

    # Data

    async def _held_examples(self) -> Sequence[Example]:
        if not callable(self._source):
            return self._examples
        found: Any = self._source()
        if inspect.isawaitable(found):
            found = await found
        return list(itertools.islice(found, _MAX_EXAMPLES))

    async def _read(self, examples: AsyncIterator[Example]) -> None:
        async for example in examples:
            self._examples.append(example)
            # A stream that never ends must not fill a device's memory.
            del self._examples[:-_MAX_EXAMPLES]

    # Patience

    async def _persist(self, call: Callable[[], Awaitable[T]], *, attempts: int | None = None) -> T:
        """Repeats a call while it fails for reasons that pass."""
        retrying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception(is_retryable),
            wait=_wait_s,
            stop=lambda state: state.attempt_number == attempts or self._stopping.is_set(),
            sleep=self._pause,  # `stop` ends the wait between two attempts
            before_sleep=_log_retry,
            reraise=True,
        )
        async for attempt in retrying:
            with attempt:
                return await call()
        raise AssertionError("unreachable: retrying ends by returning or raising")

    async def _unless_stopping(self, call: Awaitable[T]) -> T | None:
        """The call's result, or None if `stop` was called first."""
        task = asyncio.ensure_future(call)
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            for pending in (task, stopping):
                pending.cancel()
            await asyncio.gather(stopping, return_exceptions=True)
            if task.cancelled() or not task.done():
                await asyncio.gather(task, return_exceptions=True)

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()


def _wait_s(state: tenacity.RetryCallState) -> float:
    failure = state.outcome.exception() if state.outcome else None
    asked = failure.retry_after_s if isinstance(failure, (ProblemError, TransportError)) else None
    return min(asked or 0.0, _MAX_WAIT_S) + _JITTER(state)


def _log_retry(state: tenacity.RetryCallState) -> None:
    failure = state.outcome.exception() if state.outcome else None
    _log.info("trying again", attempt=state.attempt_number, reason=str(failure))
