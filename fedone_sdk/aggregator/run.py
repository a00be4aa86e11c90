"""A run that is being served: its state, changed one event and one transaction at a time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import structlog

from fedone_sdk.aggregator.codec import arrays_of, decode, encode_arrays, encode_document
from fedone_sdk.aggregator.events import (
    Accepted,
    Closed,
    Effect,
    Event,
    MemorySaved,
    ModelSeen,
    PauseAsked,
    Refused,
    Restarted,
    RoundFinished,
    RunEnded,
    SeatsVacant,
)
from fedone_sdk.aggregator.machine import RoundMachine
from fedone_sdk.aggregator.state import RunState
from fedone_sdk.algorithms import alpha_sha256, dump_memory
from fedone_sdk.backends import Answer
from fedone_sdk.clock import Clock
from fedone_sdk.errors import ProblemError
from fedone_sdk.messages import (
    CacheReport,
    Cap,
    CensoringReport,
    PromptReport,
    RoundReport,
    RunResult,
    RunTask,
    Traffic,
)
from fedone_sdk.spec import RunSpec
from fedone_sdk.stores import ClosedWork, Commit, LogEntry, RunRecord, Store
from fedone_sdk.vocabulary import Vocabulary

__all__ = ["Listener", "ServedRun"]

_log = structlog.get_logger(__name__)

Listener = Callable[["ServedRun", Effect], None]
"""Told of what happens to a run, once it is safe in the store."""


@dataclass(slots=True)
class _Counters:
    """Traffic since the run began; saved with the next event, so a crash may lose a little."""

    communication: Traffic = field(default_factory=Traffic)
    gateway: Traffic = field(default_factory=Traffic)
    cache_hits: int = 0
    values: int = 0
    censored: int = 0

    def dump(self) -> dict[str, Any]:
        return {
            "communication": self.communication.model_dump(),
            "gateway": self.gateway.model_dump(),
            "cache_hits": self.cache_hits,
            "values": self.values,
            "censored": self.censored,
        }

    @classmethod
    def load(cls, document: Mapping[str, Any]) -> _Counters:
        return cls(
            communication=Traffic.model_validate(document["communication"]),
            gateway=Traffic.model_validate(document["gateway"]),
            cache_hits=document["cache_hits"],
            values=document["values"],
            censored=document["censored"],
        )


class ServedRun:
    """Applies events to a run: the machine decides, the store keeps, listeners are told.

    Args:
        machine: Decides.
        vocabulary: The run's candidates.
        store: Keeps the state.
        clock: Tells the time.
        available: Who could take a seat now: enrolment index -> examples held.
        name_of: Client id of an enrolment index, for reports.
        listener: Told of every effect once it is safe in the store.

    Attributes:
        counters: Traffic and cache hits.
        history: One entry per round.
        ended: Set while the run does not run.
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
        name_of: Callable[[int], str],
        listener: Listener,
    ) -> None:
        self.machine = machine
        self.vocabulary = vocabulary
        self.counters = _Counters()
        self.history: list[RoundReport] = []
        self.ended = asyncio.Event()
        self.broken_off = False
        self._store = store
        self._clock = clock
        self._available = available
        self._name_of = name_of
        self._listener = listener
        self._lock = asyncio.Lock()
        self._state = machine.start()
        self._arrays = arrays_of(self._state)
        self._version = 0

    @property
    def run_id(self) -> str:
        """Names the run."""
        return self.machine.run_id

    @property
    def spec(self) -> RunSpec:
        """What the run is."""
        return self.machine.spec

    @property
    def state(self) -> RunState:
        """Where it stands."""
        return self._state

    async def create(self) -> None:
        """Stores a new run."""
        await self._store.add_run(
            RunRecord(
                run_id=self.run_id,
                spec=self.spec.model_dump_json(),
                candidates=json.dumps(self.vocabulary.candidates),
                document=self._document(self._state),
                arrays=encode_arrays(self._arrays),
                version=0,
                created_at=self._clock.now(),
            )
        )

    async def load(self, record: RunRecord) -> None:
        """Takes up a stored run where it stands.

        What was under way when the process ended may have been sent: it is charged in full.
        Clients' leases stay open; their owners or their deadlines settle them. A run that was
        scored by another model pauses.
        """
        document = json.loads(record.document)
        self.counters = _Counters.load(document.pop("counters"))
        self._state = decode(document, record.arrays)
        self._arrays = arrays_of(self._state)
        self._version = record.version
        metrics = {}
        for entry in await self._store.log(self.run_id):
            body = json.loads(entry.body)
            if entry.kind == "round":
                self.history.append(RoundReport.model_validate(body["report"]))
            elif entry.kind == "metric":
                metrics[body["round"]] = body["value"]
        self.history = [
            report.model_copy(update={"metric": metrics.get(report.round)})
            for report in self.history
        ]
        self.broken_off = self.machine.can_resume(self._state)
        if not self._state.running:
            self.ended.set()
        await self.apply(Restarted())
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

    async def apply(self, event: Event) -> tuple[Effect, ...]:
        """Applies an event and whatever follows from it in one transaction.

        Returns:
            The effects, which are already stored and told to the listener.

        Raises:
            ProblemError: The machine refused the event.
        """
        # Shielded: a caller that goes away must not leave a transaction half done.
        effects = await asyncio.shield(asyncio.ensure_future(self._apply(event)))
        for effect in effects:
            if isinstance(effect, Refused):
                raise ProblemError(effect.code, effect.detail)
        return effects

    async def _apply(self, event: Event) -> tuple[Effect, ...]:
        async with self._lock:
            now = self._clock.now()
            state, effects = self.machine.step(self._state, event, now)
            if self.machine.wants_seating(state) and not isinstance(event, SeatsVacant):
                seating = SeatsVacant(available=self._available(self))
                state, more = self.machine.step(state, seating, now)
                effects += more
            if state is not self._state:
                await self._commit(state, effects)
            for effect in effects:
                self._tell(effect)
        return effects

    async def seat(self) -> None:
        """Gives free seats to clients that are available."""
        if self.machine.wants_seating(self._state):
            await self.apply(SeatsVacant(available=self._available(self)))

    async def record_metric(self, round_number: int, value: float) -> None:
        """Adds a point to the metric's curve."""
        body = json.dumps({"round": round_number, "value": value})
        entry = LogEntry(kind="metric", body=body)
        await asyncio.shield(asyncio.ensure_future(self._append(entry)))
        self.history = [
            report.model_copy(update={"metric": value}) if report.round == round_number else report
            for report in self.history
        ]

    async def _append(self, entry: LogEntry) -> None:
        async with self._lock:
            await self._store_commit(self._state, log=(entry,))

    async def _commit(self, state: RunState, effects: Sequence[Effect]) -> None:
        closed, log, memories = [], [], []
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
            elif isinstance(effect, RoundFinished):
                body = {"report": self._report(effect).model_dump(), **effect.record}
                log.append(LogEntry(kind="round", body=json.dumps(body)))
            elif isinstance(effect, MemorySaved):
                memories.append((effect.client, dump_memory(effect.memory)))
        await self._store_commit(
            state, closed=tuple(closed), log=tuple(log), memories=tuple(memories)
        )

    async def _store_commit(self, state: RunState, **changes: Any) -> None:
        arrays = arrays_of(state)
        same = arrays.keys() == self._arrays.keys() and all(
            arrays[name] is self._arrays[name] for name in arrays
        )
        commit = Commit(
            document=self._document(state),
            arrays=None if same else encode_arrays(arrays),
            **changes,
        )
        await self._store.commit(self.run_id, self._version, commit)
        self._version += 1
        self._state, self._arrays = state, arrays

    def _document(self, state: RunState) -> str:
        document = {**encode_document(state), "counters": self.counters.dump()}
        return json.dumps(document, separators=(",", ":"))

    def _report(self, effect: RoundFinished) -> RoundReport:
        names = ",".join(self._name_of(client) for client in effect.clients)
        return effect.report.model_copy(update={"client_id": names})

    def _tell(self, effect: Effect) -> None:
        if isinstance(effect, RoundFinished):
            self.history.append(self._report(effect))
        elif isinstance(effect, RunEnded):
            self.ended.set()
            _log.info("run ended", run_id=self.run_id, status=effect.status)
        elif isinstance(effect, Closed):
            _log.info("assignment closed", run_id=self.run_id, **asdict(effect))
        self._listener(self, effect)

    async def note(self, answers: Iterable[Answer]) -> None:
        """Counts what answers say of themselves; a model that the run did not know pauses it."""
        models = dict[str, None]()
        for answer in answers:
            self.counters.cache_hits += answer.cached
            self.counters.values += sum(len(row) for row in answer.log_probs if row is not None)
            self.counters.censored += answer.censored
            if answer.model is not None:
                models[answer.model] = None
        for model in models:
            if model not in self._state.models:
                await self.apply(ModelSeen(model=model))

    def count(self, upload: int, download: int, *, gateway: bool) -> None:
        """Adds an exchange of HTTP bodies to the run's report."""
        if gateway:
            self.counters.gateway = self.counters.gateway.plus(upload, download)
        else:
            self.counters.communication = self.counters.communication.plus(upload, download)

    @property
    def task(self) -> RunTask:
        """What a client must know of the run."""
        return RunTask(
            task=self.spec.task,
            method=self.spec.method,
            prompt_len=self.spec.prompt.length,
            vocab_size=len(self.vocabulary),
            blank=self.vocabulary.blank,
            vocabulary_sha256=self.vocabulary.sha256,
            gateway=self.machine.gateway_model is not None,
        )

    def prompt(self, state: RunState | None = None) -> PromptReport:
        """The deployable prompt of a state, the newest by default."""
        indices = self.machine.algorithm.prompt((state or self._state).method).tolist()
        return PromptReport(
            text=self.vocabulary.text(indices), tokens=tuple(self.vocabulary.tokens(indices))
        )

    def result(self) -> RunResult:
        """Where the run stands, or how it ended."""
        state = self._state
        began = state.started_at
        until = state.ended_at if state.ended_at is not None else self._clock.now()
        return RunResult(
            run_id=self.run_id,
            name=self.spec.name,
            status=state.status,
            reason=state.reason,
            rounds=state.round,
            cap=Cap.of(self.spec.budget),
            spent=state.account.spent,
            leased=state.account.leased,
            cache=CacheReport(hits=self.counters.cache_hits),
            censoring=CensoringReport(values=self.counters.values, censored=self.counters.censored),
            evaluation=state.evaluation.spent,
            communication=self.counters.communication,
            gateway=self.counters.gateway,
            metric=state.metric,
            history=tuple(self.history),
            prompt=self.prompt(),
            alpha_sha256=alpha_sha256(state.method.alpha),
            model=state.model,
            models=state.models,
            wall_s=0.0 if began is None else round(until - began, 3),
            seed=self.spec.seed,
        )
