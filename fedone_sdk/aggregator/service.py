"""What the aggregator does for its callers, message in, message out; HTTP is a layer above."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import structlog

from fedone_sdk.aggregator.auth import Authority, digest, new_secret
from fedone_sdk.aggregator.evaluation import Evaluation
from fedone_sdk.aggregator.events import (
    Accepted,
    Assigned,
    Closed,
    Declined,
    Effect,
    PauseAsked,
    Renewed,
    ResumeAsked,
    RunEnded,
    SeatOffered,
    StopAsked,
    TimePassed,
    UpdateArrived,
    WorkAsked,
)
from fedone_sdk.aggregator.gateway import Gateway
from fedone_sdk.aggregator.machine import RoundMachine
from fedone_sdk.aggregator.run import Listener, ServedRun
from fedone_sdk.aggregator.state import Seat
from fedone_sdk.aggregator.throttle import Throttle
from fedone_sdk.algorithms import load_memory
from fedone_sdk.backends import LLMBackend, query_for, want_of
from fedone_sdk.backends.wrappers import BudgetedBackend
from fedone_sdk.clock import Clock
from fedone_sdk.errors import BackendError, BackendUnavailable, ProblemError, SpecError
from fedone_sdk.messages import (
    AlphaAssignment,
    AlphaUpdate,
    Claim,
    Decline,
    Enrol,
    Enrolled,
    LossesAssignment,
    LossesUpdate,
    Receipt,
    Score,
    Scores,
)
from fedone_sdk.spec import RunSpec
from fedone_sdk.stores import ClientRecord, LogEntry, Store
from fedone_sdk.task import Example, ScoreFunction
from fedone_sdk.vocabulary import Vocabulary

__all__ = ["Service", "check_caps"]

_log = structlog.get_logger(__name__)

_SEEN_LATELY_S = 60.0
"""A client that asked for work this lately counts as available."""


@dataclass(slots=True)
class _Presence:
    seen: float
    num_examples: int
    run_id: str | None
    polls: int = 0


class Service:
    """The aggregator without HTTP.

    Args:
        store: Keeps everything that must survive.
        clock: Tells the time.
        authority: Checks tokens.
        backend: The gateway's model; None when clients bring their own.
    """

    def __init__(
        self,
        *,
        store: Store,
        clock: Clock,
        authority: Authority,
        backend: LLMBackend | None = None,
    ) -> None:
        self.authority = authority
        self.runs: dict[str, ServedRun] = {}
        self.listeners: list[Listener] = []
        self._store = store
        self._clock = clock
        if backend is not None and not backend.metered:
            # Every request must be charged to the run that it is for.
            backend = BudgetedBackend(backend)
        self._backend = backend
        self._gateway = None if backend is None else Gateway(backend)
        self._throttle = Throttle()
        self._evaluations: dict[str, Evaluation] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._clients: list[ClientRecord] = []
        self._by_credential: dict[str, ClientRecord] = {}
        self._presence: dict[int, _Presence] = {}
        self._wakers: dict[int, asyncio.Event] = {}
        self._deadlines = asyncio.Event()
        self._adding = asyncio.Lock()

    # Lifetime

    async def start(self) -> None:
        """Opens the store and takes up what it holds."""
        await self._store.open()
        for client in await self._store.clients():
            self._remember(client)
        for record in await self._store.runs():
            spec = RunSpec.model_validate_json(record.spec)
            vocabulary = Vocabulary(candidates=tuple(json.loads(record.candidates)))
            machine = self._machine(record.run_id, spec, vocabulary)
            trouble = None
            try:
                await self._look_at_model(machine)
            except (BackendError, SpecError) as exc:
                trouble = _one_line(exc)
            run = self._serve(machine, vocabulary)
            await run.load(record)
            if trouble is not None:
                await run.apply(PauseAsked(reason=trouble))
            self.runs[run.run_id] = run
            _log.info("run taken up", run_id=run.run_id, status=run.state.status)
        self._tasks["deadlines"] = asyncio.create_task(self._watch_deadlines(), name="deadlines")

    async def stop(self) -> None:
        """Ends background work and closes the store; runs go on at the next start."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._tasks.clear()
        if self._gateway is not None:
            await self._gateway.stop()
        await self._store.close()

    async def ready(self) -> None:
        """Raises if requests cannot be served now."""
        await self._store.ping()

    # Runs

    async def add_run(
        self,
        spec: RunSpec,
        vocabulary: Vocabulary,
        *,
        dev: Sequence[Example] = (),
        score: ScoreFunction | None = None,
    ) -> ServedRun:
        """Adds a run under its spec's name; a stored run with the same spec is taken up again.

        Args:
            spec: The run.
            vocabulary: Its candidates.
            dev: Held-out examples to measure prompts on.
            score: The user's function that measures them, for loss ``score``.

        Raises:
            SpecError: The run cannot work, or its name is taken by a different run.
            LabelWordError: A label word is not one token of the model.
            BackendError: The model cannot be asked.
        """
        async with self._adding:
            run = self.runs.get(spec.name)
            if run is None:
                machine = self._machine(spec.name, spec, vocabulary)
                await self._look_at_model(machine)
                run = self._serve(machine, vocabulary)
                await run.create()
                self.runs[run.run_id] = run
            elif not run.spec.is_same_run(spec) or run.vocabulary != vocabulary:
                raise SpecError(f"name: {spec.name!r} is taken by a run with another description")
        if dev and self._backend is not None and run.run_id not in self._evaluations:
            self._evaluations[run.run_id] = Evaluation(run, self._backend, dev, score)
            self._evaluate(run)
        self._wake(self._wakers)
        return run

    def _machine(self, run_id: str, spec: RunSpec, vocabulary: Vocabulary) -> RoundMachine:
        try:
            return RoundMachine(
                run_id,
                spec,
                vocab_size=len(vocabulary),
                blank=vocabulary.blank,
                gateway_model=None if self._backend is None else "",
            )
        except ValueError as exc:
            raise SpecError(f"method: {exc}") from exc

    def _serve(self, machine: RoundMachine, vocabulary: Vocabulary) -> ServedRun:
        return ServedRun(
            machine,
            vocabulary=vocabulary,
            store=self._store,
            clock=self._clock,
            available=self._available,
            name_of=lambda index: self._clients[index].client_id,
            listener=self._on_effect,
        )

    async def _look_at_model(self, machine: RoundMachine) -> None:
        """Sees whether the model can do a run, and what its queries cost at most.

        Raises:
            SpecError: The run asks for what the model cannot do.
            BackendError: The model cannot be asked.
        """
        spec, backend = machine.spec, self._backend
        if backend is None:
            check_caps(spec, frozenset({"queries"}))
            return
        # First: some models say only then what they can do.
        await backend.check(spec.task.label_words)
        check_caps(spec, backend.bounds)
        want = want_of(spec.task, backend.answers)
        if want == "text" and not spec.gateway.generated_text:
            raise SpecError(
                "gateway.generated_text: must be true for loss score, whose texts leave the gateway"
            )
        # What the template has that the model cannot take is seen here, and not query by query.
        nothing = dict.fromkeys(spec.task.fields, "")
        await backend.quote(query_for(spec.task, "", [nothing], backend=backend, references=["a"]))
        machine.worst_query = backend.worst_case(spec.method.batch_size, spec.task.max_written)
        machine.gateway_model = backend.fingerprint

    async def stop_run(self, run: ServedRun, reason: str | None = None) -> None:
        """Ends a run with what it has learnt."""
        await run.apply(StopAsked(reason=reason))

    async def resume_run(self, run: ServedRun) -> None:
        """Lets a stopped run go on, with the model that there is now.

        Raises:
            ProblemError: ``run_conflict`` when it runs or has ended for good, ``backend_blocked``
                or ``backend_unavailable`` when the model still cannot be asked.
        """
        if self._backend is not None:
            self._backend.reset()
        if run.machine.can_resume(run.state):  # else the machine says why not
            try:
                await self._look_at_model(run.machine)
            except (BackendError, SpecError) as exc:
                passes = isinstance(exc, BackendUnavailable)
                code = "backend_unavailable" if passes else "backend_blocked"
                raise ProblemError(code, _one_line(exc)) from exc
        model = run.state.model
        run.ended.clear()
        try:
            await run.apply(ResumeAsked())
        except ProblemError:
            if not run.state.running:
                run.ended.set()
            raise
        if model is not None and run.state.model != model:
            _log.warning(
                "the run goes on with another model",
                run_id=run.run_id,
                before=model,
                now=run.state.model,
            )
        self._evaluate(run)
        self._wake(self._wakers)

    async def wait(self, run: ServedRun) -> None:
        """Returns when a run has ended, what it had asked is answered, and its end is measured."""
        await run.ended.wait()
        if self._gateway is not None:
            await self._gateway.wait(run)  # It is paid: a cache shall keep it.
        task = self._tasks.get(f"evaluation {run.run_id}")
        if task is not None:
            await asyncio.shield(task)

    def run(self, run_id: str) -> ServedRun:
        """The run of this name.

        Raises:
            ProblemError: ``not_found``.
        """
        try:
            return self.runs[run_id]
        except KeyError:
            raise ProblemError("not_found", f"there is no run {run_id!r}") from None

    def _evaluate(self, run: ServedRun) -> None:
        evaluation = self._evaluations.get(run.run_id)
        if evaluation is not None:
            name = f"evaluation {run.run_id}"
            if name in self._tasks and not self._tasks[name].done():
                return  # It sees by itself that the run goes on.
            self._tasks[name] = asyncio.create_task(evaluation.follow(), name=name)

    # Clients

    async def enrol(self, token: str | None, message: Enrol) -> Enrolled:
        """Makes a client identity for who holds an enrolment token."""
        self.authority.check_enrolment(token)
        client_id, credential = f"client-{uuid.uuid4().hex[:12]}", new_secret("fedone")
        client = await self._store.add_client(
            client_id=client_id,
            credential_sha256=digest(credential),
            name=message.name,
            now=self._clock.now(),
        )
        self._remember(client)
        return Enrolled(client_id=client_id, credential=credential)

    def client(self, credential: str | None) -> ClientRecord:
        """The client that this credential belongs to.

        Raises:
            ProblemError: ``unauthorized``.
        """
        # A dictionary of digests: what its timing could tell is the digest, not the secret.
        known = None if credential is None else self._by_credential.get(digest(credential))
        if known is None:
            raise ProblemError("unauthorized", "this needs the credential of an enrolled client")
        return known

    def _remember(self, client: ClientRecord) -> None:
        # Enrolments may overlap; the index says where each belongs.
        while len(self._clients) <= client.index:
            self._clients.append(client)
        self._clients[client.index] = client
        self._by_credential[client.credential_sha256] = client

    # Work

    async def claim(
        self, client: ClientRecord, message: Claim
    ) -> AlphaAssignment | LossesAssignment | None:
        """Gives work, waiting for it up to the client's ``wait_s``; None when there is none.

        Raises:
            ProblemError: ``run_ended`` when all runs that the client may work for have ended.
        """
        presence = self._presence.setdefault(
            client.index, _Presence(seen=0.0, num_examples=0, run_id=None)
        )
        presence.seen = self._clock.now()
        presence.num_examples, presence.run_id = message.num_examples, message.run_id
        presence.polls += 1
        waker = self._wakers.setdefault(client.index, asyncio.Event())
        patience = asyncio.get_running_loop().time() + message.wait_s
        try:
            while True:
                waker.clear()
                assignment = await self._find_work(client, message.run_id)
                if assignment is not None:
                    return assignment
                async with asyncio.timeout_at(patience):
                    await waker.wait()
        except TimeoutError:
            return None
        finally:
            presence.seen = self._clock.now()
            presence.polls -= 1

    async def _find_work(
        self, client: ClientRecord, run_id: str | None
    ) -> AlphaAssignment | LossesAssignment | None:
        runs = list(self.runs.values()) if run_id is None else [self.run(run_id)]
        if runs and not any(run.state.running or run.state.paused for run in runs):
            raise ProblemError("run_ended", "all runs that you could work for have ended")
        for run in runs:
            if not run.state.running:
                continue
            await run.seat()
            if run.state.seat_of(client.index) is None:
                continue
            memory = {}
            if run.machine.remembers_clients:
                saved = await self._store.memory(run.run_id, client.index)
                memory = {} if saved is None else dict(load_memory(saved))
            asked = WorkAsked(client=client.index, assignment_id=uuid.uuid4().hex, memory=memory)
            for effect in await run.apply(asked):
                if isinstance(effect, Assigned):
                    return effect.assignment
        return None

    async def update(
        self,
        client: ClientRecord,
        assignment_id: str,
        message: AlphaUpdate | LossesUpdate,
        body_sha256: str,
    ) -> Receipt:
        """Takes a client's work; the same body again gets the same receipt.

        Raises:
            ProblemError: ``assignment_expired``, ``update_conflict``, ``model_mismatch``,
                ``invalid_message`` or ``not_found``.
        """
        held = self._work_of(client, assignment_id)
        if held is not None:
            arrived = UpdateArrived(
                assignment_id=assignment_id, update=message, body_sha256=body_sha256
            )
            try:
                effects = await held[0].apply(arrived)
            except ValueError as exc:
                raise ProblemError("invalid_message", str(exc)) from exc
            except ProblemError as exc:
                if exc.code != "assignment_expired":
                    raise
                # It ended while this one waited its turn: perhaps by the same update, sent twice.
            else:
                return next(e.receipt for e in effects if isinstance(e, Accepted))
        closed = await self._store.closed(assignment_id)
        if closed is None or closed.client_index != client.index:
            raise ProblemError("not_found", f"you have no assignment {assignment_id}")
        if closed.receipt is None:
            raise ProblemError(
                "assignment_expired", f"assignment {assignment_id} has ended: {closed.outcome}"
            )
        if closed.body_sha256 != body_sha256:
            raise ProblemError(
                "update_conflict", f"another update was accepted for assignment {assignment_id}"
            )
        return Receipt.model_validate_json(closed.receipt)

    async def renew(
        self, client: ClientRecord, assignment_id: str
    ) -> AlphaAssignment | LossesAssignment:
        """Gives a client that is still at work another full deadline."""
        run, _ = await self._working(client, assignment_id)
        effects = await run.apply(Renewed(assignment_id=assignment_id))
        return next(e.assignment for e in effects if isinstance(e, Assigned))

    async def decline(self, client: ClientRecord, assignment_id: str, message: Decline) -> None:
        """Takes work back that a client cannot do."""
        run, _ = await self._working(client, assignment_id)
        await run.apply(
            Declined(assignment_id=assignment_id, reason=message.reason, usage=message.usage)
        )

    async def score(self, client: ClientRecord, message: Score, body_sha256: str) -> Scores:
        """The gateway: scores prompts under the client's lease."""
        run, seat = await self._working(client, message.assignment_id)
        if self._gateway is None:
            raise ProblemError("not_found", "this server has no gateway; score on the device")
        policy = run.spec.gateway
        self._throttle.admit(
            self._clock.now(),
            ((run.run_id, client.index), policy.client_requests_per_minute),
            (run.run_id, policy.run_requests_per_minute),
        )
        return await self._gateway.score(run, seat, message, body_sha256)

    def _work_of(self, client: ClientRecord, assignment_id: str) -> tuple[ServedRun, Seat] | None:
        for run in self.runs.values():
            seat = run.state.seat_with(assignment_id)
            if seat is not None and seat.client == client.index:
                return run, seat
        return None

    async def _working(self, client: ClientRecord, assignment_id: str) -> tuple[ServedRun, Seat]:
        held = self._work_of(client, assignment_id)
        if held is not None:
            return held
        closed = await self._store.closed(assignment_id)
        if closed is None or closed.client_index != client.index:
            raise ProblemError("not_found", f"you have no assignment {assignment_id}")
        raise ProblemError("assignment_expired", f"assignment {assignment_id} has ended")

    async def log(self, run: ServedRun) -> list[LogEntry]:
        """A run's log, oldest first."""
        return await self._store.log(run.run_id)

    def traffic_run(
        self, *, run_id: str | None = None, assignment_id: str | None = None
    ) -> ServedRun | None:
        """The run whose report counts a message: the one it names, or the only one there is."""
        if assignment_id is not None:
            for run in self.runs.values():
                if run.state.seat_with(assignment_id) is not None:
                    return run
        if run_id is None and len(self.runs) == 1:
            return next(iter(self.runs.values()))
        return self.runs.get(run_id or "")

    # What happens by itself

    def _available(self, run: ServedRun) -> Mapping[int, int]:
        horizon = self._clock.now() - _SEEN_LATELY_S
        busy = {
            seat.client
            for other in self.runs.values()
            if other is not run
            for seat in other.state.seats
            if seat.phase == "working"
        }
        return {
            index: presence.num_examples
            for index, presence in self._presence.items()
            if (presence.polls or presence.seen > horizon)
            and presence.run_id in (None, run.run_id)
            and index not in busy
        }

    def _on_effect(self, run: ServedRun, effect: Effect) -> None:
        if isinstance(effect, SeatOffered):
            self._wake([effect.client])
        elif isinstance(effect, RunEnded):
            self._wake(self._wakers)
        elif isinstance(effect, (Accepted, Closed)) and self._gateway is not None:
            ended = effect.receipt if isinstance(effect, Accepted) else effect
            self._gateway.forget(ended.assignment_id)
        self._deadlines.set()
        evaluation = self._evaluations.get(run.run_id)
        if evaluation is not None:
            evaluation.notice(effect)
        for listener in self.listeners:
            listener(run, effect)

    def _wake(self, clients: Sequence[int] | Mapping[int, asyncio.Event]) -> None:
        for client in clients:
            waker = self._wakers.get(client)
            if waker is not None:
                waker.set()

    async def tick(self) -> None:
        """Takes seats from clients whose deadline has passed."""
        now = self._clock.now()
        for run in list(self.runs.values()):
            due = run.machine.next_deadline(run.state)
            if run.state.running and due is not None and due <= now:
                await run.apply(TimePassed())

    async def _watch_deadlines(self) -> None:
        while True:
            self._deadlines.clear()
            try:
                await self.tick()
            except Exception:
                # A store that fails now may work again; deadlines must not stop being watched.
                _log.exception("deadlines could not be applied")
                await asyncio.sleep(1)
                continue
            due = [
                deadline
                for run in self.runs.values()
                if run.state.running
                and (deadline := run.machine.next_deadline(run.state)) is not None
            ]
            wait = max(min(due) - self._clock.now(), 0.001) if due else None
            try:
                async with asyncio.timeout(wait):
                    await self._deadlines.wait()
            except TimeoutError:
                continue


def check_caps(spec: RunSpec, bounds: frozenset[str]) -> None:
    """Refuses caps in units that the model does not bound before they are spent.

    Raises:
        SpecError: Names the cap, and what to do.
    """
    caps = spec.budget.model_dump(exclude_none=True) if spec.budget else {}
    for unit in caps:
        if unit in bounds:
            continue
        if unit == "usd" and {"prompt_tokens", "completion_tokens"} <= bounds:
            raise SpecError(
                "budget.usd: the price of this model is not known; set backend.prices "
                "(prompt and completion, US dollars per million tokens), or cap tokens instead"
            )
        raise SpecError(
            f"budget.{unit}: the server cannot bound this before it is spent (it can "
            f"bound {', '.join(sorted(bounds))})"
        )


def _one_line(error: BackendError | SpecError) -> str:
    text = "; ".join(error.problems) if isinstance(error, SpecError) else str(error)
    return " ".join(text.split())
