"""A served run, which applies handlers (the functions of `rounds`) and commits their results."""

from __future__ import annotations

import asyncio
import json
import traceback
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

import structlog

from fedone_sdk import stores
from fedone_sdk.aggregator.access import Access
from fedone_sdk.aggregator.concurrency import in_thread, in_thread_if_large, run_to_end
from fedone_sdk.aggregator.rounds import RoundMachine, lifecycle, run_state
from fedone_sdk.aggregator.rounds.run_state import Closed, Result, RunState, Seat
from fedone_sdk.aggregator.rounds.seats import assign, fill
from fedone_sdk.aggregator.rounds.updates import accept
from fedone_sdk.aggregator.runs.changes import Change
from fedone_sdk.aggregator.runs.run_view import Counters, RunView, reasons
from fedone_sdk.aggregator.signals import RunChanged
from fedone_sdk.algorithms import State, dump_memory, load_memory
from fedone_sdk.backends import Answer
from fedone_sdk.clock import Clock
from fedone_sdk.errors import MethodError, ProblemError, StoreUnavailable
from fedone_sdk.evaluation.outcomes import OUTCOMES, Outcomes, Which, newest_outcomes
from fedone_sdk.messages import LostWork
from fedone_sdk.vocabulary import Vocabulary

_log = structlog.get_logger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

Handler = Callable[..., Result[Any]]
ObserveCommit = Callable[[str], AbstractContextManager[object]]

_RETRY_S = 1.0

_SLOW: frozenset[Handler] = frozenset({assign, accept, lifecycle.stop, lifecycle.roll_back})
"""Handlers that may call the `ask` or the `tell` of the method."""


class ServedRun(RunView):
    """Applies handlers to a run, commits their results to the store and notifies the listener.

    Several replicas may serve a run. Each has a copy of the run's state, applies a handler to it,
    and commits the result if the store still has the version of the copy. Otherwise another replica
    was first: the copy is reloaded, and the handler is applied again.

    Args:
        available: Returns, for each client that can be drawn now, its number of examples; keys are
            enrolment indices.
        listener: Called with every change after its commit.

    Attributes:
        model_checked: Set, except during the check of the model after a restart. During the check
            the run assigns no work, and requests of devices about its work wait.
        was_stopped: Whether the run was stopped, paused or failed when it was loaded.
        may_be_stale: Whether the store may have commits whose signal has not arrived.
        due: The run's next deadline, seconds since the epoch.
        needs_seating: Whether `fill` has to be called (`RoundMachine.needs_seating`).
    """

    def __init__(
        self,
        machine: RoundMachine,
        *,
        vocabulary: Vocabulary,
        store: stores.Store,
        clock: Clock,
        available: Callable[[ServedRun], Mapping[int, int]],
        access: Access,
        listener: Callable[[ServedRun, Change], None],
        observe_commit: ObserveCommit,
    ) -> None:
        super().__init__(machine, vocabulary, clock)
        self.ended = asyncio.Event()
        self.model_checked = asyncio.Event()
        self.model_checked.set()
        self.was_stopped = False
        self._new_counters = Counters()
        self._store = store
        self._available = available
        self._access = access
        self._listener = listener
        self._observe_commit = observe_commit
        self._lock = asyncio.Lock()
        self._arrays = run_state.arrays_of(self.state)
        self._known_version = 0
        self.may_be_stale = False
        self.due: float | None = None
        self.needs_seating = machine.needs_seating(self.state)

    @property
    def replica(self) -> str:
        """Id of this replica."""
        return self._store.replica

    @property
    def counters(self) -> Counters:
        """Traffic, cache hits and scored values."""
        return self._stored_counters.plus(self._new_counters)

    async def create(self) -> None:
        """Store a new run; a ``ValueError`` if the store has a run of this name."""
        self._created_at = self._clock.now()
        await self._store.add_run(
            stores.RunRecord(
                run_id=self.run_id,
                spec=self.spec.model_dump_json(),
                candidates=self.initial_vocabulary.dump(),
                document=run_state.encode_document(self.state, counters=self._stored_counters),
                arrays=dump_memory(self._arrays),
                version=0,
                created_at=self._created_at,
            )
        )

    async def load(self, record: stores.RunRecord) -> None:
        """Load a stored run."""
        await self._load_record(record)
        self.was_stopped = self.state.can_resume

    def on_remote_commit(self, changed: RunChanged) -> None:
        """Record another replica's commit; `catch_up` loads it."""
        if changed.version > self._known_version:
            # A version was skipped: the signal of its commit is missing.
            self.may_be_stale |= changed.version > self._known_version + 1
            self._known_version, self.due = changed.version, changed.due

    def on_remote_version(self, version: int) -> None:
        """Record that the store has this version."""
        if version > self._known_version:
            self._known_version, self.may_be_stale = version, True

    @property
    def is_stale(self) -> bool:
        """Whether the store may have a newer version than this copy."""
        return self.may_be_stale or self._known_version > self.version

    async def catch_up(self) -> None:
        """Reload the state if it is stale."""
        if self.is_stale:
            await run_to_end(self._catch_up(), owner=self._store)

    async def _catch_up(self) -> None:
        async with self._lock:
            if self.is_stale:
                before = self.state.round
                await self._reload()
                if self.state.round > before:  # Another replica has finished a round.
                    self._active_at = self._clock.now()

    async def _reload(self) -> None:
        # Cleared first: a signal that arrives during the read may be newer than what is read.
        self.may_be_stale, before = False, self.state
        try:
            record = await self._store.run(self.run_id)
            if record is None:
                raise ProblemError("not_found", f"run {self.run_id!r} was deleted")
            await self._load_record(record)
        except BaseException:
            self.may_be_stale = True
            raise
        self._listener(self, Change.reload(before, self.state))

    async def _load_record(self, record: stores.RunRecord) -> None:
        await self.read(record, stores.log_pages(self._store, self.run_id, after=self._logged))
        self._arrays = run_state.arrays_of(self.state)

    def _on_new_state(self) -> None:
        super()._on_new_state()
        self.needs_seating = self.machine.needs_seating(self.state)
        self._known_version = max(self._known_version, self.version)
        if self._known_version == self.version:  # Otherwise a newer signal has set `due`.
            self.due = self.state.next_deadline
        if self.state.running:
            self.ended.clear()
        else:
            self.ended.set()

    def use_machine(self, machine: RoundMachine) -> None:
        """Replace the machine by one with another fingerprint or other costs of the model."""
        self.base = machine
        self._on_new_state()

    async def apply(
        self,
        handler: Callable[Concatenate[RoundMachine, RunState, float, P], Result[T]],
        *args: P.args,
        **data: P.kwargs,
    ) -> T:
        """Apply a handler of the round machine and commit its result in one transaction.

        Returns:
            The reply, after the commit and the call of the listener.

        Raises:
            ProblemError: The handler refused the request.
        """
        result = await run_to_end(self._apply(handler, data), owner=self._store)
        if result.refusal is not None:
            raise result.refusal
        reply: T = result.reply
        return reply

    async def persist(self, action: Callable[[], Awaitable[T]]) -> T | None:
        """Call `action` until the store is available; return None if it raises `ProblemError`."""
        with suppress(ProblemError):
            return await self.wait_for_store(action)
        return None

    async def wait_for_store(self, action: Callable[[], Awaitable[T]]) -> T:
        """Call `action` until the store is available."""
        while True:
            try:
                return await action()
            except StoreUnavailable as exc:
                _log.error("waiting for the store", run_id=self.run_id, reason=str(exc))
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise asyncio.CancelledError from exc  # The next start charges open leases.
                await asyncio.sleep(_RETRY_S)

    async def _apply(self, handler: Handler, data: Mapping[str, Any]) -> Result[Any]:
        async with self._lock:
            while True:
                if self.is_stale:
                    await self._reload()
                try:
                    result = await self._handle(handler, await self._complete_data(handler, data))
                except MethodError as exc:
                    result = self._fail_run(exc)
                except ProblemError:
                    if await self._has_newer_version():
                        continue  # The newest state decides whether the handler refuses.
                    raise
                if result.state is self.state and not result.log:
                    if result.reply is not None and await self._has_newer_version():
                        continue
                    return result
                try:
                    change = await self._commit(result)
                    break
                except stores.VersionConflict:
                    self.may_be_stale = True
            if any(closed.receipt is not None for closed in change.closed):
                self._active_at = self._clock.now()
            change.write_log(self.run_id, self.state)
            self._listener(self, change)
        return result

    def _fail_run(self, error: MethodError) -> Result[Any]:
        """End the run because of an error of its method; open work is kept for a resume."""
        reason, lines = str(error), "".join(traceback.format_exception(error))
        _log.error("a method failed", run_id=self.run_id, reason=reason, traceback=lines)
        now = self._clock.now()
        result = lifecycle.stop(
            self.machine, self.state, now, status="failed", reason=reason, keep=True
        )
        refusal = ProblemError("run_conflict", "the run has failed; its open work is kept")
        return replace(result, refusal=refusal)

    async def _complete_data(self, handler: Handler, data: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a handler, completed with data of the store and the pool.

        For `charge_lost_replicas`, `alive` also gets the replicas that have started meanwhile.
        Otherwise their model calls would be charged as lost.
        """
        more: dict[str, Any] = {}
        if handler is lifecycle.charge_lost_replicas:
            more["alive"] = data["alive"] | await self._store.alive()
        elif handler is lifecycle.roll_back and 0 < data["to_round"] <= self.state.round:
            more["method"] = await self._snapshot(data["to_round"])
        elif handler is assign and self.machine.remembers_clients:
            saved = await self._store.memory(self.run_id, data["client"])
            more["memory"] = None if saved is None else load_memory(saved)
        if handler is assign and self.state.seat_of(data["client"]) is None:
            more |= self._pool_data()
        return {**data, **more}

    async def _handle(self, handler: Handler, data: dict[str, Any]) -> Result[Any]:
        """Apply a handler, then `fill` if the round lacks clients; return the combined result."""
        now = self._clock.now()
        if self.machine.is_slow and handler in _SLOW:  # Slow handlers block the event loop.
            result = await in_thread(self.base.handle, self.state, now, handler, **data)
        else:
            result = self.base.handle(self.state, now, handler, **data)
        if handler is fill or not self.base.at(result.state).needs_seating(result.state):
            return result
        seated = result.then(self.base.handle(result.state, now, fill, **self._pool_data()))
        return replace(seated, reply=result.reply, refusal=result.refusal)

    def _pool_data(self) -> dict[str, Any]:
        return {"available": self._available(self), "enrolled": self._access.num_clients}

    async def pause(self, cause: Exception | str) -> None:
        """Pause the run because of a failure."""
        reason, summary = reasons(cause)
        await self.apply(lifecycle.pause, reason=reason, summary=summary)

    async def _snapshot(self, number: int) -> State:
        every = self.base.snapshot_every
        stored = None
        if number % every == 0:
            stored = await self._store.memory(self.run_id, stores.SERVER, number)
        if stored is None:
            kept = "every round" if every == 1 else f"rounds 0, {every}, {2 * every}, ..."
            raise ProblemError(
                "run_conflict",
                f"there is no snapshot of round {number}; the run keeps snapshots of {kept}",
            )
        return await in_thread_if_large(len(stored), run_state.decode_snapshot, stored)

    async def _has_newer_version(self) -> bool:
        """Whether the store has a newer version whose signal has not arrived yet."""
        if not self._store.shared:
            return False
        if (await self._store.versions()).get(self.run_id, 0) <= self.version:
            return False
        self.may_be_stale = True
        return True

    async def prefetch_prompts(self, seat: Seat) -> None:
        """If drawing a seat's prompts is slow, draw them in a thread and cache them."""
        machine = self.machine
        if machine.losses_exchange and machine.is_slow:
            await in_thread(machine.candidates, self.state, seat)

    async def seat(self) -> None:
        """Draw clients for the vacant seats of the round."""
        if self.needs_seating:
            await self.apply(fill, **self._pool_data())

    async def record_metric(self, round_number: int, value: float) -> None:
        """Record the metric of the prompt after a round, measured on the dev rows."""
        await self.apply(_append, kind="metric", record={"round": round_number, "value": value})

    async def record_outcomes(self, outcomes: Outcomes) -> None:
        """Store the outcomes of a prompt's evaluation in the run's log."""
        await self.apply(_append, kind=OUTCOMES, record=outcomes.model_dump(mode="json"))

    async def outcomes(self) -> dict[Which, Outcomes]:
        """Return the newest stored outcomes of each prompt; a `ResultError` if they are damaged."""
        pages = stores.log_pages(self._store, self.run_id, OUTCOMES)
        return newest_outcomes([entry async for page in pages for entry in page])

    async def _commit(self, result: Result[Any]) -> Change:
        """Store a handler's result in one transaction; return the change."""
        before, state, finished = self.state, result.state, result.finished
        without_update = [closed for closed in result.closed if closed.receipt is None]
        clients = [closed.client for closed in without_update]
        clients += finished.clients if finished is not None else ()
        names = dict(zip(clients, await self._access.names(clients), strict=True))
        lost = [
            LostWork(
                round=before.round,  # Not `state.round`: the handler may have ended the round.
                client_id=names[closed.client],
                reason=closed.reason,
                said=closed.said,
                at=self._clock.now(),
            )
            for closed in without_update
        ]
        log = [stores.LogEntry(kind="lost", body=work.model_dump_json()) for work in lost]
        every = self.base.snapshot_every
        # Stored with the round of the next snapshot, so that a rollback to it keeps the memories.
        kept_at = -(-state.round // every) * every
        memories = [
            stores.StoredMemory(client_index=client, round=kept_at, value=dump_memory(memory))
            for client, memory in result.memories.items()
        ]
        if finished is not None:
            client_id = ",".join(names[client] for client in finished.clients)
            report = finished.report.model_copy(update={"client_id": client_id})
            finished = replace(finished, report=report)
            result = replace(result, finished=finished)
            body = {"report": report.model_dump(), **finished.record}
            text = await in_thread_if_large(self._num_bytes, json.dumps, body)
            log.append(stores.LogEntry(kind="round", body=text))
            if state.round == kept_at:
                encode, size = run_state.encode_snapshot, self._num_bytes
                value = await in_thread_if_large(size, encode, state)
                memories.append(
                    stores.StoredMemory(client_index=stores.SERVER, round=kept_at, value=value)
                )
        log += [stores.LogEntry(kind=kind, body=json.dumps(record)) for kind, record in result.log]
        change = Change.of(before, result)
        await self._store_commit(
            state,
            change,
            closed=tuple(map(self._closed_work, result.closed)),
            log=tuple(log),
            memories=tuple(memories),
            back_to=change.back_to,
        )
        if change.back_to is not None:
            del self.history[change.back_to :]
        if finished is not None:
            self.history.append(finished.report)
        for kind, record in result.log:
            if kind == "metric":
                self._add_metric(record["round"], record["value"])
        self.lost.extend(lost)
        return change

    def _closed_work(self, closed: Closed) -> stores.ClosedWork:
        receipt = closed.receipt
        return stores.ClosedWork(
            assignment_id=closed.assignment_id,
            run_id=self.run_id,
            client_index=closed.client,
            outcome=closed.reason,
            body_sha256=None if receipt is None else receipt.body_sha256,
            receipt=None if receipt is None else receipt.model_dump_json(),
        )

    async def _store_commit(self, state: RunState, change: Change, **changes: Any) -> None:
        arrays = run_state.arrays_of(state)
        same = arrays.keys() == self._arrays.keys() and all(
            arrays[name] is self._arrays[name] for name in arrays
        )
        encoded = None
        if not same:
            size = sum(array.nbytes for array in arrays.values())
            encoded = await in_thread_if_large(size, dump_memory, arrays)
        counters, fresh = self.counters, self._new_counters
        self._new_counters = Counters()
        signal = None
        if self._store.shared:
            signal = change.signal(self.run_id, self.version + 1, state)
        document = run_state.encode_document(state, counters=counters)
        commit = stores.Commit(document=document, arrays=encoded, signal=signal, **changes)
        try:
            with self._observe_commit(self.run_id):
                await self._store.commit(self.run_id, self.version, commit)
        except KeyError:
            raise ProblemError("not_found", f"run {self.run_id!r} was deleted") from None
        except stores.VersionConflict:
            self._new_counters = fresh.plus(self._new_counters)
            raise
        except BaseException:
            # It is unknown whether the store has the commit, so the next handler reloads.
            self.may_be_stale = True
            raise
        self.version += 1
        self._stored_counters = counters
        self.state, self._arrays = state, arrays
        self._on_new_state()
        if commit.log:
            self._logged = self.version

    @property
    def _num_bytes(self) -> int:
        return sum(array.nbytes for array in self._arrays.values())

    async def record_answers(self, answers: Iterable[Answer]) -> None:
        """Count answers; pause the run if the provider reports another name for the model."""
        counters, models = self._new_counters, dict[str, None]()
        for answer in answers:
            counters.cache_hits += answer.cached
            counters.values += sum(len(row) for row in answer.log_probs if row is not None)
            counters.censored += answer.censored
            if answer.model is not None:
                models[answer.model] = None
        for model in models:
            if model not in self.state.models:
                _log.info("the provider reports the model's name", run_id=self.run_id, model=model)
                await self.persist(partial(self.apply, lifecycle.record_model, model=model))

    def count_unpriced(self, requests: int) -> None:
        """Add requests without a known price, so that the run's cost counts as unknown."""
        self._new_counters.unpriced += requests

    def count_traffic(self, upload: int, download: int, *, gateway: bool) -> None:
        """Add the sizes of a request and a response body to the run's traffic."""
        counters = self._new_counters
        if gateway:
            counters.gateway = counters.gateway.plus(upload, download)
        else:
            counters.communication = counters.communication.plus(upload, download)


def _append(
    machine: RoundMachine, state: RunState, now: float, *, kind: str, record: Mapping[str, Any]
) -> Result[None]:
    """Add a line to the run's log."""
    return Result(state=state, log=((kind, record),))
