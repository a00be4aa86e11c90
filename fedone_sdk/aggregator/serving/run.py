"""A run that is being served: its state, changed one event and one transaction at a time."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import structlog

from fedone_sdk.aggregator.cluster.signals import MAX_NAMED, RunMoved
from fedone_sdk.aggregator.rounds import RoundMachine
from fedone_sdk.aggregator.rounds.codec import arrays_of, decode, encode_arrays, encode_document
from fedone_sdk.aggregator.rounds.events import (
    Accepted,
    CapsRaised,
    ClientQuarantined,
    Closed,
    Effect,
    Event,
    MemorySaved,
    MetricKnown,
    ModelSeen,
    PauseAsked,
    Refused,
    Restarted,
    RolledBack,
    RoundFinished,
    RunEnded,
    RunRolledBack,
    SeatOffered,
    SeatsVacant,
    WorkAsked,
)
from fedone_sdk.aggregator.rounds.state import RunState, Seat
from fedone_sdk.aggregator.runtime.rate_limit import Bucket
from fedone_sdk.aggregator.runtime.shielded import run_shielded
from fedone_sdk.aggregator.runtime.threads import in_thread, in_thread_if_large
from fedone_sdk.aggregator.serving.influence import influences
from fedone_sdk.aggregator.serving.outcomes import OUTCOMES, Outcomes, Which, newest_outcomes
from fedone_sdk.aggregator.serving.verdict import judge, not_measured, sentence
from fedone_sdk.algorithms import alpha_sha256, dump_memory, load_memory
from fedone_sdk.backends import Answer, LLMBackend, Show, shown_by
from fedone_sdk.candidates import no_prompt, prompt_of
from fedone_sdk.clock import Clock
from fedone_sdk.errors import ProblemError
from fedone_sdk.messages import (
    Array,
    CacheReport,
    Cap,
    CensoringReport,
    ClientInfluence,
    LostWork,
    PromptReport,
    RoundReport,
    RunEvent,
    RunResult,
    RunSummary,
    RunTask,
    SeatReport,
    Traffic,
    Verdict,
    VocabularyList,
)
from fedone_sdk.messages.ndarray import to_wire
from fedone_sdk.metrics import MetricFunction
from fedone_sdk.spec import RunSpec
from fedone_sdk.stores import (
    ClosedWork,
    Commit,
    LogEntry,
    RunRecord,
    Store,
    VersionConflict,
    log_pages,
)
from fedone_sdk.vocabulary import Vocabulary

__all__ = ["CaughtUp", "Counters", "Listener", "RunOwner", "ServedRun"]

_log = structlog.get_logger(__name__)

_MAX_LOST = 200
"""Lost work that a copy of a run remembers; the log has it all."""


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """Another replica had moved the run; its state is the newest one again."""


Listener = Callable[["ServedRun", Effect | CaughtUp], None]
"""Told of what happens to a run, once it is safe in the store."""


class RunOwner(Protocol):
    """The service that serves a run.

    Attributes:
        listeners: Called with the effects of all its runs.
    """

    listeners: list[Listener]

    async def wait(self, run: ServedRun) -> None:
        """Return when a run has ended and its final prompt is measured."""
        ...

    async def stop_run(self, run: ServedRun, reason: str | None = None) -> None:
        """End a run with what it has learnt."""
        ...


@dataclass(slots=True)
class Counters:
    """Traffic and answers; saved with the next event, so a crash may lose a little.

    Attributes:
        communication: Federated messages.
        gateway: Scoring through the gateway.
        cache_hits: Queries that were answered without asking the model.
        values: Label log-probabilities that were scored.
        censored: How many of them are upper bounds only.
        unpriced: Requests whose price is not known.
    """

    communication: Traffic = field(default_factory=Traffic)
    gateway: Traffic = field(default_factory=Traffic)
    cache_hits: int = 0
    values: int = 0
    censored: int = 0
    unpriced: int = 0

    def plus(self, other: Counters) -> Counters:
        """The sum of both."""
        return Counters(
            communication=self.communication.sum(other.communication),
            gateway=self.gateway.sum(other.gateway),
            cache_hits=self.cache_hits + other.cache_hits,
            values=self.values + other.values,
            censored=self.censored + other.censored,
            unpriced=self.unpriced + other.unpriced,
        )

    def dump(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "communication": self.communication.model_dump(),
            "gateway": self.gateway.model_dump(),
            "cache_hits": self.cache_hits,
            "values": self.values,
            "censored": self.censored,
            "unpriced": self.unpriced,
        }

    @classmethod
    def load(cls, document: Mapping[str, Any]) -> Counters:
        """What was dumped."""
        return cls(
            communication=Traffic.model_validate(document["communication"]),
            gateway=Traffic.model_validate(document["gateway"]),
            cache_hits=document["cache_hits"],
            values=document["values"],
            censored=document["censored"],
            unpriced=document.get("unpriced", 0),
        )


_Line = tuple[int, RoundReport | LostWork | RunRolledBack | MetricKnown | None]
"""What a run keeps of a line of its log, with the line's version."""


def _lines_of(entries: Iterable[LogEntry]) -> list[_Line]:
    return [(entry.version, _line_of(entry)) for entry in entries]


def _line_of(entry: LogEntry) -> RoundReport | LostWork | RunRolledBack | MetricKnown | None:
    if entry.kind == "round":
        return RoundReport.model_validate(json.loads(entry.body)["report"])
    if entry.kind == "lost":
        return LostWork.model_validate_json(entry.body)
    if entry.kind == "rollback":
        record = json.loads(entry.body)
        return RunRolledBack(to_round=record["round"], record=record)
    if entry.kind == "metric":
        body = json.loads(entry.body)
        return MetricKnown(round=body["round"], value=body["value"])
    return None


def _size_of(entries: Iterable[LogEntry]) -> int:
    return sum(len(entry.body) for entry in entries)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unsure:
    """A commit of which it is not known whether it was stored.

    Attributes:
        version: Of the run, if it was.
        document: What it stored.
        counters: What it would have added.
    """

    version: int
    document: str
    counters: Counters


class ServedRun:
    """Applies events to a run: the machine decides, the store keeps, listeners are told.

    Several replicas may serve a run. Each keeps a copy of its state; an event is applied to the
    copy and committed on top of the version that it was made from. Where another replica was
    faster, the copy is read anew and the same event applied to that.

    Args:
        machine: Decides.
        vocabulary: The candidates that the run began with.
        store: Keeps the state.
        clock: Tells the time.
        available: Who could take a seat now: enrolment index -> examples held.
        enrolled: How many clients there are.
        names: Client ids of enrolment indices, for reports.
        listener: Told of every effect once it is safe in the store.
        priced: Whether the price of the gateway's model is known.
        owner: The service that serves it; None for a run that is only read.

    Attributes:
        base: The machine with the candidates that the run began with.
        history: One entry per round.
        lost: The newest work that came to nothing, oldest first.
        ended: Set while the run does not run.
        checked: Set unless its model is being looked at: until then it gives and takes no work.
        broken_off: Whether it was stopped, paused or failed already when it was taken up.
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
        self.base = machine
        self._vocabulary = vocabulary
        self._proposed: tuple[tuple[str, str], ...] = ()
        self._grown = vocabulary
        self.history: list[RoundReport] = []
        self.lost: deque[LostWork] = deque(maxlen=_MAX_LOST)
        self.ended = asyncio.Event()
        self.checked = asyncio.Event()
        self.checked.set()
        self.broken_off = False
        self._created_at: float | None = None
        self._active_at: float | None = None
        self._stored = Counters()
        self._fresh = Counters()
        self._unsure: _Unsure | None = None
        self._store = store
        self._clock = clock
        self._available = available
        self._enrolled = enrolled
        self._names = names
        self._listener = listener
        self._priced = priced
        self._owner = owner
        self._lock = asyncio.Lock()
        policy = machine.spec.gateway
        self._rate_of_client = Bucket(policy.client_requests_per_minute)
        self._rate = Bucket(policy.run_requests_per_minute)
        self._state = machine.start()
        self._arrays = arrays_of(self._state)
        self._version = 0
        self._newest = 0
        self._doubtful = False
        self._logged = -1
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
        await self._service.stop_run(self, reason)
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
        # Imported here: the feed is built on this module.
        from fedone_sdk.aggregator.serving.feed import Feed

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
            raise RuntimeError(f"run {self.run_id!r} is read from a file and not served")
        return self._owner

    @property
    def run_id(self) -> str:
        """Names the run."""
        return self.base.run_id

    @property
    def spec(self) -> RunSpec:
        """What the run is."""
        return self.base.spec

    @property
    def machine(self) -> RoundMachine:
        """Decides, with the candidates that there are now."""
        return self.base.at(self._state)

    @property
    def vocabulary(self) -> Vocabulary:
        """The candidates that there are now."""
        return self._grown

    @property
    def state(self) -> RunState:
        """Where it stands, as far as this replica has seen."""
        return self._state

    @property
    def version(self) -> int:
        """The commit that the state is of."""
        return self._version

    @property
    def counters(self) -> Counters:
        """Traffic and cache hits."""
        counters = self._stored.plus(self._fresh)
        return counters if self._unsure is None else counters.plus(self._unsure.counters)

    @property
    def due(self) -> float | None:
        """When its next deadline is over, seconds since the epoch, whoever set it."""
        return self._due

    async def create(self) -> None:
        """Stores a new run.

        Raises:
            ValueError: There is a run of this name.
        """
        self._created_at = self._clock.now()
        await self._store.add_run(
            RunRecord(
                run_id=self.run_id,
                spec=self.spec.model_dump_json(),
                candidates=self._vocabulary.dump(),
                document=self._document(self._state, self._stored),
                arrays=encode_arrays(self._arrays),
                version=0,
                created_at=self._created_at,
            )
        )

    async def load(self, record: RunRecord) -> None:
        """Takes up a stored run where it stands."""
        await self._take(record)
        self.broken_off = self.machine.can_resume(self._state)

    @property
    def summary(self) -> RunSummary:
        """Where it stands, in a line."""
        state = self._state
        return RunSummary(
            run_id=self.run_id,
            status=state.status,
            round=state.round,
            rounds=self.spec.rounds,
            cap=Cap.of(state.account.cap),
            spent=state.account.spent,
            priced=not self.counters.unpriced,
            created_at=self._created_at,
            ended_at=state.ended_at,
            metric=self._newest_metric,
            metric_name=state.metric.name,
            active_at=self._active_at,
        )

    @property
    def _newest_metric(self) -> float | None:
        if self._state.metric.after is not None:
            return self._state.metric.after
        measured = (r.metric for r in reversed(self.history) if r.metric is not None)
        return next(measured, self._state.metric.before)

    async def restarted(self, alive: frozenset[str], *, down: bool) -> None:
        """Charges in full what replicas that are gone had under way; it may have been sent.

        Clients' leases stay open; their owners or their deadlines settle them.

        Args:
            alive: The replicas that are running.
            down: Whether nobody served the run for a while, so that its deadlines are renewed.
        """
        await self.apply(Restarted(alive=alive, down=down))

    async def check_model(self) -> None:
        """Pauses the run if it was scored by another model than there is now."""
        before, now = self._state.model, self.machine.gateway_model
        if before and now and before != now:
            reason = (
                f"the server's model is {now!r}, the run was scored by {before!r}; "
                "resume the run to accept it"
            )
            if reason not in (self._state.reason or ""):
                # Nobody has seen it yet, so nobody who starts the run again accepts it.
                await self.apply(PauseAsked(reason=reason))
                self.broken_off = False

    # What other replicas did

    def hear(self, moved: RunMoved) -> None:
        """Takes note of another replica's commit; `catch_up` reads it."""
        if moved.version > self._newest:
            # Where one was not heard of, nobody knows whom it offered a seat.
            self._doubtful |= moved.version > self._newest + 1
            self._newest, self._due = moved.version, moved.due

    def hear_version(self, version: int) -> None:
        """Takes note that the store holds this version."""
        if version > self._newest:
            self._newest, self._doubtful = version, True

    def doubt(self) -> None:
        """Signals may have been lost: the next `catch_up` reads the run."""
        self._doubtful = True

    @property
    def doubtful(self) -> bool:
        """Whether something may have happened of which nobody told."""
        return self._doubtful

    @property
    def behind(self) -> bool:
        """Whether the run may have moved on from this copy."""
        return self._doubtful or self._newest > self._version

    async def catch_up(self) -> None:
        """Makes sure that the state is the newest that is known to exist."""
        if self.behind:
            await run_shielded(self._catch_up(), of=self._store)

    async def _catch_up(self) -> None:
        async with self._lock:
            if self.behind:
                before = self._state.round
                await self._reload()
                if self._state.round > before:  # At another replica.
                    self._active_at = self._clock.now()

    async def _reload(self) -> None:
        # Cleared first: what is heard while the store reads may be newer than what it reads.
        self._doubtful = False
        try:
            record = await self._store.run(self.run_id)
            if record is None:
                raise ProblemError("not_found", f"run {self.run_id!r} was deleted")
            await self._take(record)
        except BaseException:
            self.doubt()
            raise
        self._listener(self, CaughtUp())

    async def _take(self, record: RunRecord) -> None:
        # Whatever fails, fails before anything is changed.
        lines: list[_Line] = []
        async for page in log_pages(self._store, self.run_id, after=self._logged):
            page = [entry for entry in page if entry.version <= record.version]
            lines += await in_thread_if_large(_size_of(page), _lines_of, page)
        document = json.loads(record.document)
        stored = Counters.load(document.pop("counters"))
        state = await in_thread_if_large(len(record.arrays), decode, document, record.arrays)
        self._settle_unsure(record)
        self._stored, self._state, self._arrays = stored, state, arrays_of(state)
        self._version, self._created_at = record.version, record.created_at
        self._moved()
        self._read(lines)

    def _settle_unsure(self, record: RunRecord) -> None:
        """Adds the counters of a commit again that the store does not have."""
        unsure, self._unsure = self._unsure, None
        if unsure is None or record.version > unsure.version:
            return  # Whose commit it was cannot be told any more: rather too little than twice.
        if (record.version, record.document) != (unsure.version, unsure.document):
            self._fresh = unsure.counters.plus(self._fresh)

    def _moved(self) -> None:
        """What follows from the state when it has become another one."""
        if self._proposed != self._state.proposed:
            self._proposed = self._state.proposed
            self._grown = self._vocabulary.with_candidates(self._proposed)
        self._newest = max(self._newest, self._version)
        if self._newest == self._version:  # else a newer deadline was heard of
            self._due = self.machine.next_deadline(self._state)
        if self._state.running:
            self.ended.clear()
        else:
            self.ended.set()

    def _read(self, lines: Iterable[_Line]) -> None:
        """Adds the rounds, and the metrics measured after them, to the history."""
        for version, line in lines:
            match line:
                case RoundReport():
                    self.history.append(line)
                case LostWork():
                    self.lost.append(line)
                case RunRolledBack():
                    del self.history[line.to_round :]
                case MetricKnown():
                    self._add_metric(line.round, line.value)
            self._logged = version

    def _add_metric(self, round_number: int, value: float) -> None:
        self.history = [
            report.model_copy(update={"metric": value}) if report.round == round_number else report
            for report in self.history
        ]

    # Events

    def admit(self, client: int) -> None:
        """Counts a client's request to the gateway, or refuses it.

        Raises:
            ProblemError: ``rate_limited``, with how long to wait.
        """
        now = self._clock.now()
        rates = ((self._rate_of_client, client), (self._rate, 0))
        for rate, who in rates:
            rate.check(who, now)
        for rate, who in rates:
            rate.take(who, now)

    async def apply(self, event: Event) -> tuple[Effect, ...]:
        """Applies an event and whatever follows from it in one transaction.

        Returns:
            The effects, which are already stored and told to the listener.

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
                if self.behind:
                    await self._reload()
                state, effects = await self._step(await self._completed(event))
                if state is self._state:
                    # An answer that no commit confirms may be that of a state that has passed.
                    if effects and await self._was_moved():
                        continue
                    break
                try:
                    await self._commit(state, effects)
                    break
                except VersionConflict:
                    self.doubt()
            for effect in effects:
                self._tell(effect)
        return effects

    async def _completed(self, event: Event) -> Event:
        """Reads what an event needs of the store, and must not be older than the state is.

        A client that asks for work does so with what its method remembers in this very state. One
        that did not work before the round that is gone back to forgets all, though it may have been
        done with its first work a moment ago. And a replica that came since it was looked who is
        alive may have something under way by now.
        """
        if isinstance(event, Restarted):
            return replace(event, alive=event.alive | await self._store.alive())
        if isinstance(event, RolledBack) and self.machine.remembers_clients:
            known = await self._store.memories(self.run_id)
            return replace(event, memories={**{one: {} for one in known}, **event.memories})
        if not (isinstance(event, WorkAsked) and self.machine.remembers_clients):
            return event
        saved = await self._store.memory(self.run_id, event.client)
        return event if saved is None else replace(event, memory=load_memory(saved))

    async def _was_moved(self) -> bool:
        """Whether another replica has moved the run, though nobody said so yet."""
        if not self._store.shared:
            return False
        if (await self._store.versions()).get(self.run_id, 0) <= self._version:
            return False
        self.doubt()
        return True

    async def _step(self, event: Event) -> tuple[RunState, tuple[Effect, ...]]:
        now = self._clock.now()
        if self.machine.takes_long(event):  # Nobody else shall wait for it.
            state, effects = await in_thread(self.machine.step, self._state, event, now)
        else:
            state, effects = self.machine.step(self._state, event, now)
        if self.base.at(state).wants_seating(state) and not isinstance(event, SeatsVacant):
            state, more = self.base.step(state, self._seating(), now)
            effects += more
        return state, effects

    async def draw(self, seat: Seat) -> None:
        """Draws the prompts of a seat, which are kept, where the draw takes long."""
        machine = self.machine
        if machine.losses_exchange and machine.slow:
            await in_thread(machine.candidates, self._state, seat)

    async def seat(self) -> None:
        """Gives free seats to clients that are available."""
        if self.machine.wants_seating(self._state):
            await self.apply(self._seating())

    def _seating(self) -> SeatsVacant:
        return SeatsVacant(available=self._available(self), enrolled=self._enrolled())

    async def clients(self) -> list[ClientInfluence]:
        """What each client has done to the run, by enrolment index."""
        lines = influences(self.machine, self._state)
        names = await self._names(list(lines))
        return [
            line.model_copy(update={"client_id": name})
            for line, name in zip(lines.values(), names, strict=True)
        ]

    async def seats(self) -> tuple[SeatReport, ...]:
        """Who works on the round under way, in the order of the seats."""
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
        """Adds a point to the metric's curve."""
        body = json.dumps({"round": round_number, "value": value})
        await run_shielded(self._append(LogEntry(kind="metric", body=body)), of=self._store)
        self._add_metric(round_number, value)
        self._tell(MetricKnown(round=round_number, value=value))

    async def record_outcomes(self, outcomes: Outcomes) -> None:
        """Writes down what a measurement found, example by example."""
        body = outcomes.model_dump_json()
        await run_shielded(self._append(LogEntry(kind=OUTCOMES, body=body)), of=self._store)

    async def outcomes(self) -> dict[Which, Outcomes]:
        """The newest measurement of each prompt that is written down.

        Raises:
            ArchiveError: A line of the log is damaged.
        """
        lines = [
            entry async for page in log_pages(self._store, self.run_id, OUTCOMES) for entry in page
        ]
        return newest_outcomes(lines)

    async def _append(self, entry: LogEntry) -> None:
        async with self._lock:
            while True:
                if self.behind:
                    await self._reload()
                try:
                    await self._store_commit(self._state, (), log=(entry,))
                    return
                except VersionConflict:
                    self.doubt()

    async def _commit(self, state: RunState, effects: Sequence[Effect]) -> None:
        closed, log, memories = [], [], []
        reports, lost = [], []
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
            elif isinstance(effect, Closed):
                closed.append(
                    ClosedWork(
                        assignment_id=effect.assignment_id,
                        run_id=self.run_id,
                        client_index=effect.client,
                        outcome=effect.reason,
                    )
                )
                (name,) = await self._names([effect.client])
                # The round before the event: with its last seat a round may end, too.
                work = LostWork(
                    round=self._state.round,
                    client_id=name,
                    reason=effect.reason,
                    at=self._clock.now(),
                )
                lost.append(work)
                # Without the time, which earlier versions refuse.
                log.append(LogEntry(kind="lost", body=work.model_dump_json(exclude={"at"})))
            elif isinstance(effect, RoundFinished):
                names = ",".join(await self._names(effect.clients))
                report = effect.report.model_copy(update={"client_id": names})
                reports.append(report)
                body = {"report": report.model_dump(), **effect.record}
                text = await in_thread_if_large(self._num_bytes, json.dumps, body)
                log.append(LogEntry(kind="round", body=text))
            elif isinstance(effect, RunRolledBack):
                log.append(LogEntry(kind="rollback", body=json.dumps(effect.record)))
            elif isinstance(effect, CapsRaised):
                log.append(LogEntry(kind="budget", body=json.dumps(effect.record)))
            elif isinstance(effect, MemorySaved):
                memories.append((effect.client, dump_memory(effect.memory)))
        await self._store_commit(
            state, effects, closed=tuple(closed), log=tuple(log), memories=tuple(memories)
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
        counters, fresh = self.counters, self._fresh
        self._fresh = Counters()
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
            self._fresh = fresh.plus(self._fresh)
            raise
        except BaseException:
            # Whether it was stored is not known where the store went away: read before going on.
            self._unsure = _Unsure(
                version=self._version + 1, document=commit.document, counters=fresh
            )
            self.doubt()
            raise
        self._version += 1
        self._stored = counters
        self._state, self._arrays = state, arrays
        self._moved()
        if commit.log:
            self._logged = self._version

    @property
    def _num_bytes(self) -> int:
        """What the state's arrays hold; a round's line of the log holds about as much."""
        return sum(array.nbytes for array in self._arrays.values())

    def _signal(self, state: RunState, effects: Sequence[Effect]) -> str:
        offered = tuple(effect.client for effect in effects if isinstance(effect, SeatOffered))
        moved = RunMoved(
            run_id=self.run_id,
            version=self._version + 1,
            due=self.machine.next_deadline(state),
            offered=offered if len(offered) <= MAX_NAMED else None,
            finished=any(isinstance(effect, RoundFinished) for effect in effects),
            status=state.status,
        )
        return moved.model_dump_json()

    def _document(self, state: RunState, counters: Counters) -> str:
        document = {**encode_document(state), "counters": counters.dump()}
        return json.dumps(document, separators=(",", ":"))

    def _tell(self, effect: Effect) -> None:
        if isinstance(effect, Accepted):
            self._active_at = self._clock.now()
        elif isinstance(effect, RunEnded):
            _log.info("run ended", run_id=self.run_id, status=effect.status)
        elif isinstance(effect, Closed):
            _log.info("assignment closed", run_id=self.run_id, **asdict(effect))
        elif isinstance(effect, CapsRaised):
            _log.info("caps raised", run_id=self.run_id, **effect.record)
        elif isinstance(effect, ClientQuarantined):
            _log.warning("client quarantined", run_id=self.run_id, **asdict(effect))
        self._listener(self, effect)

    async def note(self, answers: Iterable[Answer]) -> None:
        """Counts what answers say of themselves; a model that the run did not know pauses it."""
        models = dict[str, None]()
        for answer in answers:
            self._fresh.cache_hits += answer.cached
            self._fresh.values += sum(len(row) for row in answer.log_probs if row is not None)
            self._fresh.censored += answer.censored
            self._fresh.unpriced += 0 if self._priced() else answer.usage.requests
            if answer.model is not None:
                models[answer.model] = None
        for model in models:
            if model not in self._state.models:
                await self.apply(ModelSeen(model=model))

    def count(self, upload: int, download: int, *, gateway: bool) -> None:
        """Adds an exchange of HTTP bodies to the run's report."""
        if gateway:
            self._fresh.gateway = self._fresh.gateway.plus(upload, download)
        else:
            self._fresh.communication = self._fresh.communication.plus(upload, download)

    @property
    def task(self) -> RunTask:
        """What a client must know of the run."""
        return RunTask(
            # Devices have no use for it, and older ones do not know it.
            task=self.spec.task.model_copy(update={"description": None}),
            method=self.spec.method,
            prompt_len=self.spec.prompt.length,
            vocab_size=self.machine.vocab_size,
            blank=self.vocabulary.blank,
            layout=self.machine.layout,
            vocabulary_sha256=self.vocabulary.sha256,
            vocabulary_version=len(self._state.proposed),
            gateway=self.machine.gateway_model is not None,
            loss_clip=self.machine.loss_clip,
            privacy=self.spec.privacy,
            calibration=self.spec.calibration,
        )

    def vocabulary_list(self, after: int = 0) -> VocabularyList:
        """The candidates; with a version of them, only those that were added since."""
        proposed = self._state.proposed
        if after:
            return VocabularyList(appended=proposed[after:], version=len(proposed))
        found = self.vocabulary
        return VocabularyList(candidates=found.candidates, slots=found.slots, version=len(proposed))

    def prompt(self, state: RunState | None = None) -> PromptReport:
        """The deployable prompt of a state, the newest by default."""
        state = state or self._state
        bias = state.bias or self.machine.bias(state)
        if self.spec.method.domain != "tokens":
            return PromptReport(text="", tokens=(), bias=bias)
        indices = self.machine.method.prompt(state.method).tolist()
        return PromptReport.of(self.spec.task, self.vocabulary, indices, bias)

    def judged(
        self, outcomes: Mapping[Which, Outcomes], measure: MetricFunction | None = None
    ) -> Verdict:
        """Whether tuning was worth it, by the measurements of the newest prompt and of others.

        Args:
            outcomes: As of `outcomes`.
            measure: The user's function, for a metric of their own.
        """
        found = judge(
            self.spec.task,
            outcomes,
            plain_bias=self.machine.plain_bias(self._state),
            calibrated=self.spec.calibration.label_free is not None,
            empty=self._is_empty,
            measure=measure,
        )
        return self._told(found)

    @property
    def _is_empty(self) -> bool:
        """Whether the deployable prompt is no prompt."""
        if self.spec.method.domain != "tokens":
            return False
        indices = self.machine.method.prompt(self._state.method).tolist()
        bare = no_prompt(self.spec.task, self.vocabulary)
        return prompt_of(self.spec.task, self.vocabulary, indices) == bare

    async def show(self, backend: LLMBackend) -> Show:
        """How the run's prompts look to a model.

        Raises:
            SpecError: The model takes no such prompts.
            BackendError: The model cannot be looked at.
        """
        return await shown_by(
            self.spec.method,
            prompt_len=self.spec.prompt.length,
            task=self.spec.task,
            vocabulary=self.vocabulary,
            backend=backend,
        )

    def vectors(self) -> Array:
        """The deployable prompt of a run that tunes no words.

        Raises:
            ProblemError: ``not_found`` for a run that does.
        """
        if self.spec.method.domain == "tokens":
            raise ProblemError("not_found", "this run tunes words, not vectors")
        return to_wire(self._state.method.alpha)

    def result(self) -> RunResult:
        """Where the run stands, or how it ended."""
        state, counters = self._state, self.counters
        began = state.started_at
        until = state.ended_at if state.ended_at is not None else self._clock.now()
        return RunResult(
            run_id=self.run_id,
            name=self.spec.name,
            status=state.status,
            reason=state.reason,
            rounds=state.round,
            cap=Cap.of(state.account.cap),
            spent=state.account.spent,
            leased=state.account.leased,
            cache=CacheReport(hits=counters.cache_hits),
            censoring=CensoringReport(values=counters.values, censored=counters.censored),
            evaluation=state.evaluation.spent,
            communication=counters.communication,
            gateway=counters.gateway,
            priced=not counters.unpriced,
            metric=state.metric,
            verdict=self._verdict(),
            history=tuple(self.history),
            prompt=self.prompt(),
            alpha_sha256=alpha_sha256(state.method.alpha),
            model=state.model,
            models=state.models,
            privacy=self.machine.releases and self.machine.releases.report(state.releases),
            quarantined=len(state.quarantined),
            wall_s=0.0 if began is None else round(until - began, 3),
            seed=self.spec.seed,
        )

    def _verdict(self) -> Verdict | None:
        state = self._state
        if state.verdict is not None:
            return self._told(state.verdict)
        if state.running or state.paused or state.metric.after is not None:
            return None
        if state.metric.no_prompt is None and state.metric.before is None:
            return not_measured("the server has no dev rows of this run (data.dev)")
        return not_measured("the evaluation has not come to the last prompt")

    def _told(self, verdict: Verdict) -> Verdict:
        """A verdict with its text."""
        state, priced = self._state, not self.counters.unpriced
        text = sentence(verdict, state.metric.name, state.account.spent, priced=priced)
        return verdict.model_copy(update={"text": text})
