"""A served run: applies events to its state, one transaction per event."""

from __future__ import annotations

import asyncio
import json
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Protocol

import structlog

from fedone_sdk.aggregator.cluster.signals import MAX_NAMED, RunChanged
from fedone_sdk.aggregator.rounds import RoundMachine
from fedone_sdk.aggregator.rounds.codec import (
    arrays_of,
    decode_snapshot,
    encode_arrays,
    encode_document,
    encode_snapshot,
)
from fedone_sdk.aggregator.rounds.events import (
    Accepted,
    CapsRaised,
    ClientQuarantined,
    Effect,
    Event,
    MemorySaved,
    MetricMeasured,
    ModelSeen,
    PauseRequested,
    Refused,
    ReplicasLost,
    RollbackRequested,
    RoundFinished,
    RunEnded,
    RunRolledBack,
    SeatOffered,
    SeatsVacant,
    StopRequested,
    WorkClosed,
    WorkRequested,
)
from fedone_sdk.aggregator.rounds.prompts import candidates
from fedone_sdk.aggregator.rounds.state import RunState, Seat
from fedone_sdk.aggregator.runtime import in_thread, in_thread_if_large, run_shielded
from fedone_sdk.aggregator.serving.feed import Feed, Listener, RunReloaded
from fedone_sdk.aggregator.serving.run_view import Counters, RunView, client_influences
from fedone_sdk.algorithms import State, dump_memory, load_memory
from fedone_sdk.backends import Answer
from fedone_sdk.clock import Clock
from fedone_sdk.errors import MethodError, ProblemError
from fedone_sdk.evaluation.outcomes import OUTCOMES, Outcomes, Which, newest_outcomes
from fedone_sdk.messages import (
    ClientInfluence,
    LostWork,
    RunEvent,
    RunResult,
    RunStatus,
    SeatReport,
)
from fedone_sdk.stores import (
    SERVER,
    ClosedWork,
    Commit,
    LogEntry,
    RunRecord,
    Store,
    StoredMemory,
    VersionConflict,
    log_pages,
)
from fedone_sdk.vocabulary import Vocabulary

if TYPE_CHECKING:
    from fedone_sdk.aggregator.serving.steering import Steering

_log = structlog.get_logger(__name__)


class RunOwner(Protocol):
    """The service that serves a run.

    Attributes:
        listeners: Called with the effects of all its runs.
        steering: Operations on its runs.
    """

    listeners: list[Listener]
    steering: Steering

    async def wait(self, run: ServedRun) -> None:
        """Wait until a run has ended and its final prompt is measured."""
        ...


class ServedRun(RunView):
    """Applies events to a run: step of the machine, commit to the store, notification of listeners.

    Several replicas may serve a run. Each has a copy of its state, and commits an event on top of
    the version that the event was applied to. If another replica commits first, the copy is
    reloaded and the event is applied again.

    Args:
        machine: The round machine.
        vocabulary: The initial candidates.
        store: The store.
        clock: Source of the current time.
        available: Returns the clients that can take a seat: enrolment index -> number of examples.
        enrolled: Returns the number of enrolled clients.
        names: Returns the client ids of enrolment indices.
        listener: Receives every effect after its commit.
        priced: Whether the price of the gateway's model is known.
        owner: The service that serves it; `wait`, `stop` and `events` need one.

    Attributes:
        ended: Set while the run is not running.
        model_checked: Cleared during the check of the model after a restart; until it is set, the
            run neither assigns work nor accepts updates.
        was_stopped: Whether the run was stopped, paused or failed when it was loaded.
    """

    def __init__(
        self,
        machine: RoundMachine,
        *,
        vocabulary: Vocabulary,
        store: Store,
        clock: Clock,
        available: Callable[[ServedRun], Mapping[int, int]],
        enrolled: Callable[[], int],
        names: Callable[[Sequence[int]], Awaitable[Sequence[str]]],
        listener: Listener,
        priced: Callable[[], bool] = lambda: True,
        owner: RunOwner | None = None,
    ) -> None:
        super().__init__(machine, vocabulary, clock)
        self.ended = asyncio.Event()
        self.model_checked = asyncio.Event()
        self.model_checked.set()
        self.was_stopped = False
        self._new_counters = Counters()
        self._store = store
        self._available = available
        self._enrolled = enrolled
        self._names = names
        self._listener = listener
        self._priced = priced
        self._owner = owner
        self._lock = asyncio.Lock()
        self._arrays = arrays_of(self._state)
        self._known_version = 0
        self._marked_stale = False
        self._due: float | None = None

    # For the embedding program

    async def wait(self) -> RunResult:
        """Return the result once the run has ended and its final prompt is measured.

        A run that is stopped, paused or failed has ended too, until it is resumed.
        """
        await self._service.wait(self)
        return self.result()

    async def stop(self, reason: str | None = None) -> RunResult:
        """End the run with what it has learnt.

        Args:
            reason: Why, for people.

        Raises:
            ProblemError: ``run_conflict`` if it has ended.
        """
        await self._service.steering.stop(self, reason)
        return self.result()

    async def events(self) -> AsyncIterator[RunEvent]:
        """Stream each finished round from the first one on, then the result.

        A round is repeated once its metric is known. The last event is a `RunResult`.

        Example:
            ```python
            async for event in run.events():
                print(event.mean_loss if isinstance(event, RoundReport) else event.status)
            ```
        """
        with Feed(self, self._service.listeners) as feed:
            while True:
                for report in feed.take():
                    yield report
                if feed.has_more:
                    continue
                if not self._state.running:
                    break
                await feed.changed()
            result = await self.wait()
            for report in feed.take():
                yield report
            yield result

    @property
    def _service(self) -> RunOwner:
        if self._owner is None:
            raise RuntimeError(f"run {self.run_id!r} has no service")
        return self._owner

    @property
    def counters(self) -> Counters:
        """Traffic, cache hits and scored values."""
        return self._stored_counters.plus(self._new_counters)

    @property
    def due(self) -> float | None:
        """The next deadline of any replica's assignments, seconds since the epoch."""
        return self._due

    async def create(self) -> None:
        """Store a new run.

        Raises:
            ValueError: A run of this name exists.
        """
        self._created_at = self._clock.now()
        await self._store.add_run(
            RunRecord(
                run_id=self.run_id,
                spec=self.spec.model_dump_json(),
                candidates=self._vocabulary.dump(),
                document=self._document(self._state, self._stored_counters),
                arrays=encode_arrays(self._arrays),
                version=0,
                created_at=self._created_at,
            )
        )

    async def load(self, record: RunRecord) -> None:
        """Load a stored run."""
        await self._load_record(record)
        self.was_stopped = self.machine.can_resume(self._state)

    async def charge_lost_replicas(self, alive: frozenset[str], *, down: bool) -> None:
        """Charge the pending calls of exited replicas in full: they may have been sent.

        Clients' leases stay open until their updates or deadlines.

        Args:
            alive: The replicas that are running.
            down: Whether no replica served the run for a while, so that deadlines start again.
        """
        await self.apply(ReplicasLost(alive=alive, down=down))

    async def check_model(self) -> None:
        """Pause the run if it was scored by another model than the current one."""
        before, now = self._state.model, self.machine.gateway_model
        if before and now and before != now:
            reason = (
                f"the server's model is {now!r}, the run was scored by {before!r}; "
                "resume the run to accept it"
            )
            if reason not in (self._state.reason or ""):
                # `was_stopped` is False, so that a plain restart does not accept the new model.
                await self.apply(PauseRequested(reason=reason))
                self.was_stopped = False

    # Commits of other replicas

    def on_remote_commit(self, changed: RunChanged) -> None:
        """Record another replica's commit; `catch_up` loads it."""
        if changed.version > self._known_version:
            # After a missed signal, its offers are unknown.
            self._marked_stale |= changed.version > self._known_version + 1
            self._known_version, self._due = changed.version, changed.due

    def on_remote_version(self, version: int) -> None:
        """Record that the store has this version."""
        if version > self._known_version:
            self._known_version, self._marked_stale = version, True

    def mark_stale(self) -> None:
        """Make the next `catch_up` reload the run, because signals may have been lost."""
        self._marked_stale = True

    @property
    def may_be_stale(self) -> bool:
        """Whether there may be commits without a signal."""
        return self._marked_stale

    @property
    def is_stale(self) -> bool:
        """Whether the store may have a newer version than this copy."""
        return self._marked_stale or self._known_version > self._version

    async def catch_up(self) -> None:
        """Reload the state if it is stale."""
        if self.is_stale:
            await run_shielded(self._catch_up(), of=self._store)

    async def _catch_up(self) -> None:
        async with self._lock:
            if self.is_stale:
                before = self._state.round
                await self._reload()
                if self._state.round > before:  # By another replica.
                    self._active_at = self._clock.now()

    async def _reload(self) -> None:
        # Cleared first: signals during the read may be newer than its result.
        self._marked_stale = False
        try:
            record = await self._store.run(self.run_id)
            if record is None:
                raise ProblemError("not_found", f"run {self.run_id!r} was deleted")
            await self._load_record(record)
        except BaseException:
            self.mark_stale()
            raise
        self._listener(self, RunReloaded())

    async def _load_record(self, record: RunRecord) -> None:
        await self.read(record, log_pages(self._store, self.run_id, after=self._logged))
        self._arrays = arrays_of(self._state)

    def _on_new_state(self) -> None:
        super()._on_new_state()
        self._known_version = max(self._known_version, self._version)
        if self._known_version == self._version:  # Else a signal had a newer deadline.
            self._due = self._state.next_deadline
        if self._state.running:
            self.ended.clear()
        else:
            self.ended.set()

    # Events

    async def apply(self, event: Event) -> tuple[Effect, ...]:
        """Apply an event in one transaction.

        Returns:
            The effects, after their commit and the call of the listener.

        Raises:
            ProblemError: The machine refused the event.
        """
        effects = await run_shielded(self._apply(event), of=self._store)
        for effect in effects:
            if isinstance(effect, Refused):
                raise ProblemError(effect.code, effect.detail)
        return effects

    async def _apply(self, event: Event) -> tuple[Effect, ...]:
        async with self._lock:
            while True:
                if self.is_stale:
                    await self._reload()
                try:
                    state, effects = await self._step(await self._complete_event(event))
                except MethodError as exc:
                    state, effects = self._failed(exc)
                if state is self._state:
                    # Without a commit, check that the answer comes from the newest state.
                    if effects and await self._has_newer_version():
                        continue
                    break
                try:
                    await self._commit(state, effects)
                    break
                except VersionConflict:
                    self.mark_stale()
            for effect in effects:
                self._emit(effect)
        return effects

    def _failed(self, error: MethodError) -> tuple[RunState, tuple[Effect, ...]]:
        """Return the run's end by an error of its own method; open work is kept for a resume."""
        _log.error(
            "a method failed",
            run_id=self.run_id,
            reason=str(error),
            traceback="".join(traceback.format_exception(error)),
        )
        stop = StopRequested(status="failed", reason=str(error), keep=True)
        state, effects = self.machine.step(self._state, stop, self._clock.now())
        refused = Refused(code="assignment_expired", detail="the run has failed")
        return state, (*effects, refused)

    async def _complete_event(self, event: Event) -> Event:
        """Add data from the store to an event, read no earlier than the state.

        A work request gets the client's current method memory, and a rollback the snapshot of its
        round. `ReplicasLost` gets replicas that have started since the list was read, because they
        may have pending calls.
        """
        if isinstance(event, ReplicasLost):
            return replace(event, alive=event.alive | await self._store.alive())
        if isinstance(event, RollbackRequested) and 0 < event.to_round <= self._state.round:
            return replace(event, method=await self._snapshot(event.to_round))
        if not (isinstance(event, WorkRequested) and self.machine.remembers_clients):
            return event
        saved = await self._store.memory(self.run_id, event.client)
        return event if saved is None else replace(event, memory=load_memory(saved))

    async def _snapshot(self, number: int) -> State:
        """Return the method's state after some rounds."""
        every = self.base.snapshot_every
        stored = None
        if number % every == 0:
            stored = await self._store.memory(self.run_id, SERVER, number)
        if stored is None:
            kept = "every round" if every == 1 else f"rounds 0, {every}, {2 * every}, ..."
            raise ProblemError(
                "run_conflict",
                f"there is no snapshot of round {number}; the run keeps those of {kept}",
            )
        return await in_thread_if_large(len(stored), decode_snapshot, stored)

    async def _has_newer_version(self) -> bool:
        """Whether the store has a newer version that was not signalled yet."""
        if not self._store.shared:
            return False
        if (await self._store.versions()).get(self.run_id, 0) <= self._version:
            return False
        self.mark_stale()
        return True

    async def _step(self, event: Event) -> tuple[RunState, tuple[Effect, ...]]:
        now = self._clock.now()
        if self.machine.is_slow_step(event):  # Would block the event loop.
            state, effects = await in_thread(self.machine.step, self._state, event, now)
        else:
            state, effects = self.machine.step(self._state, event, now)
        if self.base.at(state).needs_seating(state) and not isinstance(event, SeatsVacant):
            state, more = self.base.step(state, self._seats_vacant(), now)
            effects += more
        return state, effects

    async def prefetch_prompts(self, seat: Seat) -> None:
        """Draw and cache the prompts of a seat in a thread if the draw is slow."""
        machine = self.machine
        if machine.losses_exchange and machine.is_slow:
            await in_thread(candidates, machine, self._state, seat)

    async def seat(self) -> None:
        """Offer vacant seats to available clients."""
        if self.machine.needs_seating(self._state):
            await self.apply(self._seats_vacant())

    def _seats_vacant(self) -> SeatsVacant:
        return SeatsVacant(available=self._available(self), enrolled=self._enrolled())

    async def clients(self) -> list[ClientInfluence]:
        """Return the influence of each client, by enrolment index."""
        lines = client_influences(self.machine, self._state)
        names = await self._names(list(lines))
        return [
            line.model_copy(update={"client_id": name})
            for line, name in zip(lines.values(), names, strict=True)
        ]

    async def seats(self) -> tuple[SeatReport, ...]:
        """Return the seats of the current round, in order."""
        seats, now = self._state.seats, self._clock.now()
        names = await self._names([seat.client for seat in seats])
        return tuple(
            SeatReport(
                slot=seat.slot,
                client_id=name,
                phase=seat.phase,
                step=seat.step,
                due_in_s=None if seat.phase == "done" else round(max(seat.due - now, 0.0), 3),
            )
            for seat, name in zip(seats, names, strict=True)
        )

    async def record_metric(self, round_number: int, value: float) -> None:
        """Add a point to the metric's curve."""
        body = json.dumps({"round": round_number, "value": value})
        await run_shielded(self._append(LogEntry(kind="metric", body=body)), of=self._store)
        self._add_metric(round_number, value)
        self._emit(MetricMeasured(round=round_number, value=value))

    async def record_outcomes(self, outcomes: Outcomes) -> None:
        """Store the outcomes of a measurement in the log."""
        body = outcomes.model_dump_json()
        await run_shielded(self._append(LogEntry(kind=OUTCOMES, body=body)), of=self._store)

    async def outcomes(self) -> dict[Which, Outcomes]:
        """Return the newest stored outcomes of each prompt.

        Raises:
            ResultError: A line of the log is damaged.
        """
        lines = [
            entry async for page in log_pages(self._store, self.run_id, OUTCOMES) for entry in page
        ]
        return newest_outcomes(lines)

    async def _append(self, entry: LogEntry) -> None:
        async with self._lock:
            while True:
                if self.is_stale:
                    await self._reload()
                try:
                    await self._store_commit(self._state, (), log=(entry,))
                    return
                except VersionConflict:
                    self.mark_stale()

    async def _commit(self, state: RunState, effects: Sequence[Effect]) -> None:
        closed, log, memories = [], [], list[StoredMemory]()
        reports, lost = [], []
        back_to, every = None, self.base.snapshot_every
        # The first round of which there is a snapshot with the clients' new memories.
        kept_at = -(-state.round // every) * every
        for effect in effects:
            if isinstance(effect, Accepted):
                receipt = effect.receipt
                closed.append(
                    ClosedWork(
                        assignment_id=receipt.assignment_id,
                        run_id=self.run_id,
                        client_index=effect.client,
                        outcome="accepted",
                        body_sha256=receipt.body_sha256,
                        receipt=receipt.model_dump_json(),
                    )
                )
            elif isinstance(effect, WorkClosed):
                closed.append(
                    ClosedWork(
                        assignment_id=effect.assignment_id,
                        run_id=self.run_id,
                        client_index=effect.client,
                        outcome=effect.reason,
                    )
                )
                (name,) = await self._names([effect.client])
                # The round before the event, which may also end the round.
                work = LostWork(
                    round=self._state.round,
                    client_id=name,
                    reason=effect.reason,
                    at=self._clock.now(),
                )
                lost.append(work)
                log.append(LogEntry(kind="lost", body=work.model_dump_json()))
            elif isinstance(effect, RoundFinished):
                names = ",".join(await self._names(effect.clients))
                report = effect.report.model_copy(update={"client_id": names})
                reports.append(report)
                body = {"report": report.model_dump(), **effect.record}
                text = await in_thread_if_large(self._num_bytes, json.dumps, body)
                log.append(LogEntry(kind="round", body=text))
                if state.round == kept_at:
                    snapshot = await in_thread_if_large(self._num_bytes, encode_snapshot, state)
                    memories.append(
                        StoredMemory(client_index=SERVER, round=kept_at, value=snapshot)
                    )
            elif isinstance(effect, RunRolledBack):
                back_to = effect.to_round
                log.append(LogEntry(kind="rollback", body=json.dumps(effect.record)))
            elif isinstance(effect, CapsRaised):
                log.append(LogEntry(kind="budget", body=json.dumps(effect.record)))
            elif isinstance(effect, MemorySaved):
                value = dump_memory(effect.memory)
                memories.append(
                    StoredMemory(client_index=effect.client, round=kept_at, value=value)
                )
        await self._store_commit(
            state,
            effects,
            closed=tuple(closed),
            log=tuple(log),
            memories=tuple(memories),
            back_to=back_to,
        )
        for effect in effects:
            if isinstance(effect, RunRolledBack):
                del self.history[effect.to_round :]
        self.history.extend(reports)
        self.lost.extend(lost)

    async def _store_commit(
        self, state: RunState, effects: Sequence[Effect], **changes: Any
    ) -> None:
        arrays = arrays_of(state)
        same = arrays.keys() == self._arrays.keys() and all(
            arrays[name] is self._arrays[name] for name in arrays
        )
        encoded = None
        if not same:
            size = sum(array.nbytes for array in arrays.values())
            encoded = await in_thread_if_large(size, encode_arrays, arrays)
        counters, fresh = self.counters, self._new_counters
        self._new_counters = Counters()
        commit = Commit(
            document=self._document(state, counters),
            arrays=encoded,
            signal=self._signal(state, effects) if self._store.shared else None,
            **changes,
        )
        try:
            await self._store.commit(self.run_id, self._version, commit)
        except KeyError:
            raise ProblemError("not_found", f"run {self.run_id!r} was deleted") from None
        except VersionConflict:
            self._new_counters = fresh.plus(self._new_counters)
            raise
        except BaseException:
            # The outcome is unknown if the store became unavailable: reload before the next event.
            self.mark_stale()
            raise
        self._version += 1
        self._stored_counters = counters
        self._state, self._arrays = state, arrays
        self._on_new_state()
        if commit.log:
            self._logged = self._version

    @property
    def _num_bytes(self) -> int:
        """Size of the state's arrays; a round's log line is about as large."""
        return sum(array.nbytes for array in self._arrays.values())

    def _signal(self, state: RunState, effects: Sequence[Effect]) -> str:
        offered = tuple(effect.client for effect in effects if isinstance(effect, SeatOffered))
        changed = RunChanged(
            run_id=self.run_id,
            version=self._version + 1,
            due=state.next_deadline,
            offered=offered if len(offered) <= MAX_NAMED else None,
            finished=any(isinstance(effect, RoundFinished) for effect in effects),
            status=state.status,
        )
        return changed.model_dump_json()

    def _document(self, state: RunState, counters: Counters) -> str:
        document = {**encode_document(state), "counters": counters.dump()}
        return json.dumps(document, separators=(",", ":"))

    def _emit(self, effect: Effect) -> None:
        if isinstance(effect, Accepted):
            self._active_at = self._clock.now()
        elif isinstance(effect, RunEnded):
            self._log_end(effect.status)
        elif isinstance(effect, WorkClosed):
            _log.info("assignment closed", run_id=self.run_id, **asdict(effect))
        elif isinstance(effect, CapsRaised):
            _log.info("caps raised", run_id=self.run_id, **effect.record)
        elif isinstance(effect, ClientQuarantined):
            _log.warning("client quarantined", run_id=self.run_id, **asdict(effect))
        self._listener(self, effect)

    def _log_end(self, status: RunStatus) -> None:
        state = self.state
        # A provider's words may quote a text; the summary does not.
        reason = state.summary or state.reason
        facts = {"status": status} | ({} if reason is None else {"reason": reason})
        log = _log.warning if state.paused or status == "failed" else _log.info
        log("run paused" if state.paused else "run ended", run_id=self.run_id, **facts)

    async def record_answers(self, answers: Iterable[Answer]) -> None:
        """Update the counters from answers; a new model name pauses the run."""
        models = dict[str, None]()
        for answer in answers:
            self._new_counters.cache_hits += answer.cached
            self._new_counters.values += sum(
                len(row) for row in answer.log_probs if row is not None
            )
            self._new_counters.censored += answer.censored
            self._new_counters.unpriced += 0 if self._priced() else answer.usage.requests
            if answer.model is not None:
                models[answer.model] = None
        for model in models:
            if model not in self._state.models:
                await self.apply(ModelSeen(model=model))

    def count_traffic(self, upload: int, download: int, *, gateway: bool) -> None:
        """Add the sizes of a request and a response body to the run's traffic."""
        if gateway:
            self._new_counters.gateway = self._new_counters.gateway.plus(upload, download)
        else:
            self._new_counters.communication = self._new_counters.communication.plus(
                upload, download
            )
