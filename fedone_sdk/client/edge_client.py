"""The edge client: it enrols, asks for work, scores prompts on its own data, returns updates."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import structlog

from fedone_sdk.backends.base import LLMBackend
from fedone_sdk.budget import NOTHING, Usage
from fedone_sdk.client.arguments import check_arguments, token_of
from fedone_sdk.client.batch import BeforeSend, Declining, Minibatch, Unfit, usable
from fedone_sdk.client.condition import (
    CONDITION_POLL_S,
    Condition,
    Gate,
    OnlyWhen,
    PutOff,
)
from fedone_sdk.client.events import EventSink, OnEvent
from fedone_sdk.client.fit import Means, RunFit
from fedone_sdk.client.identity import Identity, shelf_of
from fedone_sdk.client.journal import Journal
from fedone_sdk.client.known_runs import KnownRuns
from fedone_sdk.client.lease import Lease
from fedone_sdk.client.link import RetryingTransport
from fedone_sdk.client.memories import Memories
from fedone_sdk.client.network import Network
from fedone_sdk.client.outbox import Outbox, Unsent
from fedone_sdk.client.patience import MAX_WAIT_S, PATIENCE_S, Backoff, asked_s
from fedone_sdk.client.privacy import PrivacyAccount
from fedone_sdk.client.reasons import reason_of
from fedone_sdk.client.scoring import GatewayOracle, Losses, Oracle, Step, score_step
from fedone_sdk.client.source import Data, Source
from fedone_sdk.client.stop import Stop
from fedone_sdk.client.trainer import Trainer
from fedone_sdk.client.transport import (
    HttpTransport,
    Idle,
    Transport,
)
from fedone_sdk.client.work import Assigned, Work
from fedone_sdk.errors import (
    FedOneError,
    LabelWordError,
    MessageError,
    MissingExtraError,
    ProblemError,
    SpecError,
    TransportError,
    is_retryable,
)
from fedone_sdk.messages import MAX_MODEL_CHARS, Array, Claim, Decline, RunTask
from fedone_sdk.spec.privacy import RequiredPrivacy
from fedone_sdk.task import Example, ScoreFunction, TaskSpec, form_of
from fedone_sdk.vocabulary import Vocabulary

__all__ = ["EdgeClient", "Outcome"]

_log = structlog.get_logger(__name__)

Outcome = Literal["worked", "declined", "refused", "idle", "paused", "offline", "ended"]
"""What one turn came to."""

_UNFIT = (Unfit, LabelWordError, MissingExtraError, SpecError)
"""Failures that the next work of the same run would meet again."""

_NOT_DECLINED = ("assignment_expired", "run_conflict", "unauthorized")
"""Refusals that leave nothing to give back: the work is gone, or kept while the run is paused."""


class EdgeClient:
    """A device that takes part in prompt tuning with its own labelled text.

    Example:
        ```python
        async with EdgeClient("https://fedone.example", token=token, data=examples) as client:
            await client.run_forever()
        ```

    Through the gateway (the default) the texts of a mini-batch leave the device; `before_send`
    sees each of them first. Labels never do, but for the loss ``nll``: its reference texts are
    what the model is asked about, and pass `before_send` too. Where no row fits a run, operators
    are shown the most frequent label that the run does not have, if it looks like one; not with
    `require_privacy`.

    It belongs to one event loop. `EdgeClientThread` runs it beside an app without one.

    Args:
        server: Base URL of the aggregator.
        token: Enrolment token; needed until the device has an identity. Blanks around it, as a
            secret's file has them, are no part of it.
        data: The examples: an iterable; an async iterator, read as it yields; or a callable
            (plain or async) that is asked for the current examples before each piece of work.
        backend: A model of the device's own; None scores through the gateway.
        trainer: Trains the soft prompts of white-box methods; None declines such work.
        score: ``score(generated, example)`` from 0 to 1, for runs whose loss is ``score``.
        before_send: Sees every text before it is scored; returns it, a redacted form, or None to
            hold the example back. Plain or async; when it raises, the example is held back.
        only_when: Whether the device may work now: it charges, is idle, its network costs
            nothing. Asked before work is claimed and before each request for scores. Plain or
            async; work under way waits while its lease can be kept, and is given back then.
        on_event: Told of progress, in the client's thread; it should return at once.
        state_dir: Folder that keeps identity, unsent updates and paid losses across restarts, for
            one process at a time; None forgets them.
        require_privacy: What the device requires of runs: work with less noise, or that would pass
            the most that it gives away, is declined. The count is kept in `state_dir` (extra
            ``privacy``). None takes any work.
        sign: Whether the device makes a key when it enrols and signs its requests from then on
            (extra ``signing``).
        name: What people may call this device, 1 to 200 characters.
        run_id: Work only for this run.
        wait_s: How long a request for work may stay open, seconds, from 0 to 60.
        network: Proxy, trusted authorities, the device's certificate.
        transport: How to reach the aggregator; HTTP by default.

    Attributes:
        next_turn_s: How long to wait before the next `run_once`, seconds: what the server asks
            idle devices for, or the backoff after a failure.

    Raises:
        DataError: `data` is empty, the state folder cannot be made, or its count of epsilon cannot
            be read.
        MissingExtraError: `require_privacy` without the extra ``privacy``.
        SpecError: The URL, the proxy, a certificate or another argument cannot be used.
    """

    def __init__(
        self,
        server: str,
        *,
        token: str | None = None,
        data: Data,
        backend: LLMBackend | None = None,
        trainer: Trainer | None = None,
        score: ScoreFunction | None = None,
        before_send: BeforeSend | None = None,
        only_when: OnlyWhen | None = None,
        on_event: OnEvent | None = None,
        state_dir: str | Path | None = None,
        require_privacy: RequiredPrivacy | None = None,
        sign: bool = False,
        name: str | None = None,
        run_id: str | None = None,
        wait_s: float = 25.0,
        network: Network | None = None,
        transport: Transport | None = None,
    ) -> None:
        check_arguments(name=name, run_id=run_id, wait_s=wait_s)
        token = token_of(token)
        self._server = server
        self._source = Source(data)
        self._backend = backend
        self._trainer = trainer
        self._score = score
        # In a process that plays many clients, and has compared their rows, a look would cost.
        self._looks = transport is None
        # Whether the server was not yet told that this device may have changed.
        self._changed = True
        self._unfit: dict[str, TaskSpec] = {}
        self._empty = False
        self._before_send = before_send
        self._teller = EventSink(on_event)
        self._condition = Condition(only_when, self._teller)
        self._run_id = run_id
        self._wait_s = wait_s
        self._stop = Stop()
        self._shelf = shelf_of(state_dir, server)
        self._privacy = (
            None
            if require_privacy is None
            else PrivacyAccount(require_privacy, state_dir, own_model=backend is not None)
        )
        self._means = Means(
            backend=backend is not None,
            score=score is not None,
            trainer=trainer is not None,
            privacy=self._privacy,
        )
        self._link = RetryingTransport(
            transport or HttpTransport(server, network=network),
            Identity(self._shelf, server),
            token=token,
            name=name,
            sign=sign,
            teller=self._teller,
            pause=lambda seconds: self._pause(seconds),
            stopping=self._stop.wished,
        )
        self._outbox = Outbox(self._shelf)
        self._memories = Memories(self._shelf)
        self._known = KnownRuns(self._fetch_task, self._fetch_vocabulary)
        self._backoff = Backoff()
        # One turn at a time, also where an app calls `run_once` beside `run_forever`.
        self._turns = asyncio.Lock()
        self.next_turn_s = 0.0

    @property
    def epsilon(self) -> float | None:
        """What this device has given away so far; None without `require_privacy`."""
        return None if self._privacy is None else self._privacy.epsilon

    @property
    def _credential(self) -> str:
        return self._link.credential

    def __repr__(self) -> str:
        return f"EdgeClient({self._server!r}, client_id={self._link.identity.client_id!r})"

    async def __aenter__(self) -> Self:
        self._source.open()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._source.aclose()
        await self._link.aclose()

    # Turns

    async def run_forever(self) -> None:
        """Works until the aggregator says that its runs have ended, or `stop` is called.

        The aggregator may restart or be out of reach meanwhile, and the network may come and go;
        the client asks again.

        Raises:
            ProblemError: The aggregator does not let this device in, or not this version.
            SpecError: There is neither an identity nor a token.
        """
        with self._stop.heeded():
            while not self._stop.wished():
                if await self.run_once() == "ended":
                    return
                await self._pause(self.next_turn_s)

    def stop(self) -> None:
        """Asks `run_forever` to return; work under way is finished first.

        Once it has returned, it can be called again. Where nothing is under way, the next call of
        `run_forever` returns at once, or the next `run_once` without waiting.

        From another thread: ``loop.call_soon_threadsafe(client.stop)``, or an `EdgeClientThread`.
        """
        self._stop.wish()

    async def enrol(self) -> None:
        """Makes sure that this device has an identity; asking for work does so by itself.

        Raises:
            ProblemError: The token is not valid.
            SpecError: There is neither an identity nor a token.
            TransportError: The aggregator cannot be reached.
        """
        async with self._turns:
            await self._link.enrol()

    async def check(self) -> tuple[RunFit, ...]:
        """Looks whether this device can take part: how its rows fit each run that is running.

        It enrols where the device has no identity. No model is asked and no work begun.

        Example:
            ```python
            for fit in await client.check():
                print(fit)  # urgency 0 of 200 because field 'label' is 'billing', not one of: ...
            ```

        Raises:
            DataError: The rows cannot be read.
            ProblemError: The aggregator does not let this device in, or there is no such run.
            SpecError: There is neither an identity nor a token.
            TransportError: The aggregator cannot be reached.
        """
        async with self._turns:
            await self._link.enrol()
            return await self._fits(await self._source.held())

    async def _fits(self, held: Sequence[Example]) -> tuple[RunFit, ...]:
        listed = {run.run_id: run.status for run in await self._link.runs()}
        if self._run_id is not None:
            if self._run_id not in listed:
                raise ProblemError("not_found", f"there is no run {self._run_id!r} for this device")
            listed = {self._run_id: listed[self._run_id]}
        found = []
        for run_id, status in listed.items():
            if status != "running":
                continue
            try:
                run = await self._link.task(run_id)
            except MessageError as exc:
                reason = f"the run cannot be understood: {exc}"
                found.append(RunFit(run_id=run_id, rows=len(held), fit=0, reason=reason))
            else:
                found.append(self._means.fit(run_id, run, held))
        return tuple(found)

    async def _look(self, held: Sequence[Example]) -> None:
        """Says in the log how the rows fit the runs, once."""
        try:
            fits = await self._fits(held)
        except (MessageError, ProblemError):
            return  # What the server has against this device it says to the claim, too.
        self._looks = False
        for fit in fits:
            say = _log.info if fit.reason is None else _log.warning
            say(f"your rows fit {fit}")
        if not fits:
            _log.warning("no run is running that this device may work for")

    async def rotate_credential(self) -> None:
        """Exchanges the device's credential for a new one; the old one ends with its first use.

        Raises:
            ProblemError: The aggregator refuses.
            TransportError: The aggregator cannot be reached; the old credential stays valid.
        """
        async with self._turns:
            await self._link.enrol()
            await self._link.rotate()

    async def run_once(self) -> Outcome:
        """Hands in what waits, asks for work once, and does it.

        Returns:
            ``worked`` when an update was accepted, ``declined`` when the work was given back,
            ``refused`` when the update came too late or did not fit, or the run scores with
            another model than the device's, ``idle`` when there was no work, ``paused`` when the
            app's condition does not hold, ``offline`` when the aggregator could not be reached or
            not answer, ``ended`` when there will be no more work. `next_turn_s` says when to call
            it again.

        Raises:
            ProblemError: The aggregator does not let this device in, or not this version.
            SpecError: There is neither an identity nor a token.
        """
        with self._stop.heeded():
            async with self._turns:
                self.next_turn_s = 0.0
                try:
                    outcome = await self._turn()
                except PutOff:
                    outcome = "paused"
                except (TransportError, MessageError, ProblemError) as exc:
                    outcome = self._broken_off(exc)
        if outcome in ("declined", "refused"):
            self.next_turn_s = self._backoff.next_s()
        if outcome == "ended":
            self._teller.tell("ended", run_id=self._run_id)
        return outcome

    def _broken_off(self, exc: TransportError | MessageError | ProblemError) -> Outcome:
        """Decides what ends a turn, and what ends the client."""
        if isinstance(exc, ProblemError) and not is_retryable(exc):
            if exc.code != "unauthorized" or not self._link.may_enrol_again:
                raise exc
            # The server has lost its clients, or revoked this one: enrol as a new one.
            _log.warning("the server does not know this device any more")
            self._link.identity.forget()
            self._known.forget()
            self._memories.forget()  # Its runs of the same names are other ones.
            for unsent in self._outbox.waiting():
                self._outbox.drop(unsent.assignment_id)
            self.next_turn_s = self._backoff.next_s()
            return "idle"
        # An answer that is none of an aggregator's is a hotel's login page, say: offline.
        self._link.is_down(exc)
        self.next_turn_s = self._backoff.next_s(asked_s(exc))
        return "offline"

    async def _turn(self) -> Outcome:
        if not await self._condition.holds():
            self.next_turn_s = CONDITION_POLL_S
            return "paused"
        self._source.open()  # where the app has no `async with`
        await self._link.enrol()
        await self._hand_in_waiting()
        try:
            held = await self._source.held()
        except Exception as exc:
            # Of an app's own function only the kind: what it says may quote private text.
            reason = str(exc) if isinstance(exc, FedOneError) else type(exc).__name__
            _log.error("the rows cannot be read", reason=reason)
            self.next_turn_s = self._backoff.next_s()
            return "idle"
        if not held:
            if not self._empty:
                _log.warning("data: this client has no examples now; it needs at least one")
            self._empty = True
            self.next_turn_s = self._wait_s
            return "idle"
        self._empty = False
        if self._looks:
            await self._look(held)
        for run_id, task in tuple(self._unfit.items()):
            if any(usable(task, example) for example in held):
                del self._unfit[run_id]
                self._changed = True
        message = Claim(
            num_examples=len(held),
            wait_s=self._wait_s,
            run_id=self._run_id,
            own_model=self._backend is not None,
            model=self._own_model(),
            changed=self._changed,
        )
        self._teller.tell("waiting", run_id=self._run_id)
        try:
            claimed = await self._stop.unless_wished(self._link.claim(message))
        except ProblemError as exc:
            if exc.code == "run_ended":
                return "ended"
            if exc.code == "model_mismatch":
                self._changed = False
                _log.warning("no work for this device's model", detail=exc.detail)
                self._teller.tell("refused", run_id=self._run_id, reason=str(exc))
                return "refused"
            raise
        if claimed is None:
            return "idle"
        self._changed = False
        if isinstance(claimed, Idle):
            self._backoff.reset()
            self.next_turn_s = min(claimed.retry_after_s, MAX_WAIT_S)
            self._teller.tell("waiting", run_id=self._run_id, retry_after_s=self.next_turn_s)
            return "idle"
        return await self._work(claimed, held)

    def _own_model(self) -> str | None:
        """The fingerprint of the device's own model; None where it is not known yet."""
        try:
            found = "" if self._backend is None else self._backend.fingerprint
        except Exception as exc:  # Before it was checked, say; a bug is met again with the work.
            _log.debug("the model has no fingerprint", error=type(exc).__name__)
            return None
        return found if 0 < len(found) <= MAX_MODEL_CHARS else None

    # Work

    async def _work(self, assignment: Assigned, held: Sequence[Example]) -> Outcome:
        log = _log.bind(run_id=assignment.run_id, round=assignment.round)
        facts = _facts(assignment)
        self._teller.tell("assigned", **facts)
        journal = Journal(self._shelf, assignment.assignment_id)
        try:
            async with Lease(
                assignment.deadline_s, lambda: self._link.renew(assignment.assignment_id)
            ) as lease:
                try:
                    unsent = await self._done(assignment, held, journal, lease)
                except (MessageError, PutOff, TransportError):
                    raise
                except Exception as exc:
                    if isinstance(exc, ProblemError) and _is_kept(exc):
                        raise
                    usage = exc.usage if isinstance(exc, Declining) else NOTHING
                    if not isinstance(exc, FedOneError):
                        # A bug, in the app's model perhaps: with the same seat after a restart it
                        # would end the client again.
                        log.error("the work failed", traceback=traceback.format_exc())
                    log.warning("assignment declined", reason=str(exc))
                    # Also what it cost before a restart.
                    usage = self._shown(usage.at_least(journal.total))
                    message = Decline(
                        reason=reason_of(exc)[:500], usage=usage, unfit=isinstance(exc, _UNFIT)
                    )
                    await self._link.decline(assignment.assignment_id, message)
                    journal.drop()
                    self._teller.tell("declined", reason=message.reason, **facts)
                    return "declined"
                await self._hand_in(unsent)
                journal.drop()
        except ProblemError as exc:
            if is_retryable(exc) or exc.code == "unauthorized":
                raise
            log.warning("work refused", code=exc.code, detail=exc.detail)
            if exc.code != "run_conflict":
                journal.drop()
            self._teller.tell("refused", reason=str(exc), **facts)
            return "refused"
        self._backoff.reset()
        return "worked"

    async def _done(
        self, assignment: Assigned, held: Sequence[Example], journal: Journal, lease: Lease
    ) -> Unsent:
        """Scores what the assignment asks for, and keeps the update until it is handed in."""
        try:
            run = await self._known.task(assignment.run_id, assignment.vocabulary_version)
        except MessageError as exc:
            # Of a newer version, say, with a method that this one does not know: to keep the seat
            # until its deadline would hold the run up.
            raise Unfit(f"the run cannot be understood: {exc}") from exc
        self._means.check(run)
        if self._privacy is not None:
            self._privacy.check(run, assignment, journal)
        examples = [example for example in held if usable(run.task, example)]
        if not examples:
            rows = self._means.compare(run, held)
            _log.warning(f"your rows fit {assignment.run_id} 0 of {rows.total}", reason=rows.reason)
            self._unfit[assignment.run_id] = run.task
            raise Unfit(f"no row fits: {rows.told}")
        scored = 0

        async def score(number: int, batch: Minibatch, prompts: Array) -> Losses:
            def told(count: int) -> None:
                nonlocal scored
                scored += count
                if count:
                    total = work.num_prompts
                    self._teller.tell("scored", done=scored, total=total, **_facts(assignment))

            step = Step(
                number=number,
                task=run.task,
                batch=batch,
                prompts=prompts,
                journal=journal,
                told=told,
                score=self._score,
                by_class=run.calibration.kind == "labels",
            )
            oracle = await self._oracle(run, assignment, lease)
            return await score_step(step, oracle, run.privacy, before_noise=before_noise)

        def before_noise(usage: Usage) -> None:
            if self._privacy is not None and run.privacy is not None:
                self._privacy.spend(run.privacy, usage)

        work = Work(
            run=run,
            assignment=assignment,
            examples=examples,
            before_send=self._before_send,
            score=score,
            trainer=self._trainer,
            before_noise=before_noise,
        )
        update, memory = await work.update(lambda: self._memories.of(assignment.run_id))
        update = update.model_copy(update={"usage": self._shown(update.usage)})
        unsent = Unsent(update=update, memory=memory, **_facts(assignment))
        # Kept before it is sent, and the losses only then given up: a device that dies here has
        # one of them.
        if self._outbox.put(unsent):
            journal.drop()
        elif run.privacy is not None:
            # After a restart, the same work would get other noise.
            self._outbox.drop(unsent.assignment_id)
            raise Declining("the noised update cannot be kept", update.usage)
        return unsent

    def _shown(self, usage: Usage) -> Usage:
        """What the server may know of what work has cost."""
        return usage if self._privacy is None else self._privacy.shown(usage)

    async def _oracle(self, run: RunTask, assignment: Assigned, lease: Lease) -> Oracle:
        ready = Gate(
            self._condition,
            lease,
            pause=lambda seconds: self._pause(seconds),
            stopping=self._stop.wished,
        ).ready
        if self._backend is not None:
            # Loaded here: a device that asks through the gateway does without them.
            from fedone_sdk.backends.prompts import shown_by
            from fedone_sdk.client.own_oracle import OwnOracle

            vocabulary = Vocabulary()
            if run.method.domain == "tokens":
                vocabulary = await self._known.vocabulary(
                    assignment.run_id, assignment.vocabulary_version
                )
            show = await shown_by(
                run.method,
                prompt_len=run.prompt_len,
                task=run.task,
                vocabulary=vocabulary,
                backend=self._backend,
            )
            return OwnOracle(self._backend, show=show, ready=ready)
        return GatewayOracle(
            assignment.assignment_id,
            ask=self._link.score,
            ready=ready,
            known=assignment.exchange == "losses",
        )

    # Handing in

    async def _hand_in_waiting(self) -> None:
        """Hands in what was finished before this device stopped or went offline."""
        for unsent in self._outbox.waiting():
            try:
                await self._hand_in(unsent)
            except ProblemError as exc:
                if is_retryable(exc) or exc.code == "unauthorized":
                    raise
                self._teller.tell("refused", reason=str(exc), **_facts(unsent))

    async def _hand_in(self, unsent: Unsent) -> None:
        """Returns finished work; sent again, it gets the same receipt.

        Raises:
            ProblemError: The server does not take it, now or ever.
            TransportError: The server cannot be reached; the work waits.
        """
        try:
            await self._link.update(unsent)
        except ProblemError as exc:
            if not is_retryable(exc) and exc.code not in ("unauthorized", "run_conflict"):
                self._outbox.drop(unsent.assignment_id)
            raise
        if unsent.memory:
            self._memories.keep(unsent.run_id, unsent.memory)
        self._outbox.drop(unsent.assignment_id)
        _log.info("updated", **_facts(unsent))
        self._teller.tell("updated", **_facts(unsent))

    # What is known of runs

    async def _fetch_task(self, run_id: str) -> RunTask:
        run = await self._link.task(run_id)
        if self._backend is not None:
            await self._backend.check(run.task.label_words, form_of(run.task))
        return run

    async def _fetch_vocabulary(
        self, run: RunTask, run_id: str, known: tuple[int, Vocabulary] | None
    ) -> Vocabulary:
        """A run's candidates, whose label words the client's model takes.

        Raises:
            Declining: They are not those of the run, or its task cannot take them.
        """
        from fedone_sdk.candidates import label_checks

        version, before = known or (0, None)
        listed = await self._link.vocabulary(run_id, version)
        try:
            vocabulary = listed.vocabulary(before if version else None)
            checks = label_checks(run.task, vocabulary) if vocabulary.slots else ()
        except ValueError as exc:
            raise Declining("the vocabulary is malformed") from exc
        if vocabulary.sha256 != run.vocabulary_sha256:
            self._known.forget()  # Candidates may have come in between the two answers.
            raise Declining("the vocabulary does not fit its run")
        if self._backend is not None:
            for words, form in checks:
                await self._backend.check(words, form)
        return vocabulary

    # RetryPolicy

    async def _pause(self, seconds: float) -> None:
        await self._stop.pause(seconds)


def _is_kept(refusal: ProblemError) -> bool:
    """Whether work that met this refusal is gone or goes on later; else it is given back."""
    # A model that stayed away for all attempts may stay away for long, unless it says how long.
    stays_away = refusal.code == "backend_unavailable" and asked_s(refusal) <= PATIENCE_S
    return (is_retryable(refusal) and not stays_away) or refusal.code in _NOT_DECLINED


def _facts(work: Assigned | Unsent) -> dict[str, Any]:
    """Which work it is."""
    return {
        "run_id": work.run_id,
        "assignment_id": work.assignment_id,
        "round": work.round,
    }
