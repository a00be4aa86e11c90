"""Dispatch of work to waiting clients, which keep a claim open as a long poll.

A round has a number of seats. For each seat a waiting client is drawn. This client's claim is then
answered with an assignment, the work of the seat.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import structlog

from fedone_sdk.aggregator.access import Access
from fedone_sdk.aggregator.authority import may_see
from fedone_sdk.aggregator.concurrency import run_to_end
from fedone_sdk.aggregator.dispatch.client_pool import MEMBER_TTL_S, ClientPool, RetryLater
from fedone_sdk.aggregator.model.calls import ModelChecks
from fedone_sdk.aggregator.rounds.seats import assign, clear_unfit
from fedone_sdk.aggregator.runs.changes import Change
from fedone_sdk.aggregator.runs.run_registry import RunRegistry
from fedone_sdk.aggregator.runs.served_run import ServedRun
from fedone_sdk.aggregator.signals import MAX_NAMED, MemberJoined, MembersLeft, encode_signals
from fedone_sdk.clock import Clock
from fedone_sdk.errors import ProblemError
from fedone_sdk.messages import Assignment, Claim, RunDevices, UnfitDevices
from fedone_sdk.stores import ClientRecord, Member, Store

_log = structlog.get_logger(__name__)

R = TypeVar("R")
_MIN_PLACES = 64
_PLACES_PER_SEAT = 4
_MAX_REASONS = 5
_MAX_REPLACED = 10
"""A warning is logged when a client has replaced its open poll this many times in a row."""
_RETRY_NOW = RetryLater(retry_after_s=0.0)
"""Makes the client claim again at once; it stays in the pool."""


@dataclass(eq=False, slots=True)
class _Poll:
    replaced: int = 0  # number of open polls that the client has replaced in a row
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    ended: bool = False

    def end(self) -> None:
        self.ended = True
        self.woken.set()


@dataclass(kw_only=True, eq=False)
class Dispatcher:
    """Assigns work to the clients that wait for it."""

    store: Store
    clock: Clock
    access: Access
    registry: RunRegistry
    models: ModelChecks
    pool: ClientPool = field(default_factory=ClientPool, init=False)
    _polls: dict[int, _Poll] = field(default_factory=dict, init=False)
    # Client -> ids of runs that may have a seat for it; `_claim_seat` checks the run's state.
    _possible_seats: dict[int, set[str]] = field(default_factory=dict, init=False)
    _draining: bool = field(default=False, init=False)
    _stopping: set[str] = field(default_factory=set, init=False)
    _rotation: int = field(default=0, init=False)

    @property
    def _runs(self) -> Mapping[str, ServedRun]:
        return self.registry.served

    @property
    def num_polls(self) -> int:
        """Number of open long polls."""
        return len(self._polls)

    async def claim(
        self, client: ClientRecord, message: Claim, run: ServedRun | None = None
    ) -> Assignment | RetryLater:
        """Wait for work up to the client's ``wait_s``; return an assignment, or when to retry.

        A client's new claim ends its previous claim. If `run` is None, the client claims work of
        any run that it may work for.

        Raises:
            ProblemError: ``run_ended`` if all these runs have ended; ``forbidden`` if the client
                has a model of its own, and none of these runs admits models on devices.
        """
        until = asyncio.get_running_loop().time() + message.wait_s
        if message.changed:
            for other in [r for r in self._runs.values() if client.index in r.state.unfit]:
                with self._ignoring_ended_run():
                    await other.apply(clear_unfit, client=client.index)
        with self._polling(client) as poll:
            while True:
                poll.woken.clear()
                eligible = self._eligible(client, message, run)
                if poll.ended:
                    return _RETRY_NOW  # A newer claim replaced this one, or the client was revoked.
                work = await self._claim_any(self.runs_of(client.index), client.index, message)
                if work is not None:
                    return work
                if self._draining:
                    return _RETRY_NOW
                answer = await self._wait_in_pool(client, message, eligible)
                if answer is not None:
                    return answer
                if poll.woken.is_set():
                    continue
                try:
                    async with asyncio.timeout_at(until):
                        await poll.woken.wait()
                except TimeoutError:
                    if not poll.woken.is_set():
                        break
        retry = self.pool.time_out(client.index, self.clock.now())
        if retry is None:
            return _RETRY_NOW
        await run_to_end(self._remove_members([client.index]), owner=self.store)
        return retry

    def _eligible(
        self, client: ClientRecord, message: Claim, run: ServedRun | None
    ) -> list[ServedRun]:
        """Return the runs that a client may work for now, or raise why its claim is refused."""
        runs = [run] if run else _visible(client, self._runs)
        if not any(each.state.running or each.state.paused for each in runs):
            stored = [] if run else _visible(client, self.registry.stored)
            # A live run that is still being loaded has not ended: the client waits for it.
            if (runs or stored) and not any(each.live for each in stored):
                raise ProblemError("run_ended", "all runs that you could work for have ended")
        admitting = runs
        if message.own_model:
            admitting = [each for each in runs if each.machine.admits(own_model=True)]
        if runs and not admitting:
            raise ProblemError(
                "forbidden",
                "the run scores with the server's model and refuses models on devices "
                "(participation.own_models); claim without own_model",
            )
        return admitting

    @contextmanager
    def _polling(self, client: ClientRecord) -> Iterator[_Poll]:
        previous = self._polls.get(client.index)
        poll = self._polls[client.index] = _Poll()
        if previous is not None:
            previous.end()
            poll.replaced = previous.replaced + 1
            if poll.replaced == _MAX_REPLACED:
                _log.warning(
                    "several devices use one identity: give each a state folder of its own, and "
                    "revoke the client",
                    client_id=client.client_id,
                )
        try:
            yield poll
        finally:
            if self._polls.get(client.index) is poll:
                del self._polls[client.index]

    async def _wait_in_pool(
        self, client: ClientRecord, message: Claim, runs: Sequence[ServedRun]
    ) -> Assignment | RetryLater | None:
        """Add a client to the pool, and draw clients; return the client's work if it is drawn."""
        entered = self.pool.enter(
            client.index,
            message.num_examples,
            message.run_id,
            client.runs,
            self.clock.now(),
            self._barred_runs(client.index, own_model=message.own_model),
        )
        if isinstance(entered, RetryLater):
            return entered
        if entered is not None:
            await run_to_end(self._store_or_remove(entered), owner=self.store)
        return await self._claim_any(self._vacant(runs), client.index, message)

    async def _store_or_remove(self, member: Member) -> None:
        # Stored before any draw, so that a draw after a crash has the same members.
        try:
            await self._store_member(member)
        except Exception:
            self.pool.remove([member.client_index])
            raise

    async def keep_waiting(self, clients: Mapping[int, int]) -> None:
        """Let clients wait for work of any run without long polls, until this call is cancelled.

        This is for a process that runs the clients itself. The service's listeners receive the
        drawn clients. The number of clients is not limited. `clients` maps the enrolment index of
        each client to its number of examples.
        """
        waiting = dict(clients)
        while True:
            until = self.clock.now() + MEMBER_TTL_S
            for index, count in waiting.items():
                member = Member(client_index=index, num_examples=count, run_id=None, until=until)
                await self.add_member(member, join=True)
            for run in self._vacant(list(self._runs.values())):
                with self._ignoring_ended_run():
                    await run.seat()
            await asyncio.sleep(MEMBER_TTL_S / 3)
            # A client that left the pool, for example after a missed seat, returns when it claims.
            waiting = {index: count for index, count in clients.items() if index in self.pool}

    async def _store_member(self, member: Member) -> None:
        signals = encode_signals(self.store, MemberJoined(member=member))
        await self.store.join(member, signals)

    def _vacant(self, runs: Sequence[ServedRun]) -> list[ServedRun]:
        # The list starts with a different run each time, so that no run takes all clients.
        self._rotation += 1
        vacant = [run for run in runs if run.needs_seating]
        first = self._rotation % max(len(vacant), 1)
        return [*vacant[first:], *vacant[:first]]

    @staticmethod
    @contextmanager
    def _ignoring_ended_run() -> Iterator[None]:
        """Suppress the refusal of a run that was deleted or has ended in the meantime."""
        try:
            yield
        except ProblemError as exc:
            if exc.code not in ("not_found", "run_conflict"):
                raise

    async def _claim_any(
        self, runs: Iterable[ServedRun], client: int, message: Claim
    ) -> Assignment | None:
        for run in runs:
            with self._ignoring_ended_run():
                work = await self._claim_seat(run, client, message)
                if work is not None:
                    return work
        return None

    async def _claim_seat(self, run: ServedRun, client: int, message: Claim) -> Assignment | None:
        await run.model_checked.wait()
        await run.catch_up()
        if not run.machine.admits(own_model=message.own_model):
            return None
        seat = run.state.seat_of(client)
        if seat is None and not run.needs_seating:
            self._possible_seats.get(client, set()).discard(run.run_id)
            return None
        if not run.state.running:
            return None  # The run is paused, and keeps the client's seat.
        if run.run_id in self._stopping and (seat is None or seat.phase == "offered"):
            return None  # The run is stopping, and gets no new assignments.
        await self.models.recheck(run)
        work = await run.apply(
            assign, client=client, assignment_id=uuid.uuid4().hex, own_model=message.own_model
        )
        if work is not None:
            self.pool.start_work(client, run.run_id)
        return work

    def available(self, run: ServedRun) -> Mapping[int, int]:
        """Return the clients that can be drawn now: enrolment index -> number of examples."""
        busy = {
            seat.client
            for other in self._runs.values()
            if other is not run
            for seat in other.state.seats
            if seat.phase == "working"
        }
        state, now = run.state, self.clock.now()
        aside = [client for client in state.strikes if state.is_aside(client, now)]
        self.pool.remove_places(run.run_id, [*state.unfit, *aside])
        waiting = self.pool.waiting(run.run_id, now)
        return {c: count for c, count in waiting.items() if c not in busy} if busy else waiting

    def count_devices(self, run: ServedRun, *, reasons: bool) -> RunDevices:
        """Count the connected clients of a run, and those of them that do not fit the run."""
        state = run.state
        members = self.pool.members(run.run_id, self.clock.now())
        unfit = Counter(state.unfit[client] for client in members if client in state.unfit)
        frequent = unfit.most_common(_MAX_REASONS) if reasons else ()
        groups = tuple(UnfitDevices(reason=reason, devices=count) for reason, count in frequent)
        return RunDevices(connected=len(members), fit=len(members) - unfit.total(), unfit=groups)

    def _barred_runs(self, client: int, *, own_model: bool = False) -> frozenset[str]:
        """Return the ids of the runs that do not draw this client at present."""
        now = self.clock.now()
        return frozenset(
            run_id
            for run_id, run in self._runs.items()
            if client in run.state.unfit
            or run.state.is_aside(client, now)
            or (own_model and not run.machine.admits(own_model=True))
        )

    async def add_member(self, member: Member, *, join: bool = False) -> None:
        """Add a client to the pool, unless it is revoked; `join` stores its membership first."""
        client = await self.access.record(member.client_index)
        if client is not None and client.revoked_at is None:
            if join:
                await self._store_member(member)
            self.pool.add(member, client.runs, self._barred_runs(client.index))

    async def drop_missed(self, run: ServedRun) -> None:
        """Remove from the pool the clients that did not claim an offered seat in time."""
        now = self.clock.now()
        missed = [
            seat.client
            for seat in run.state.timed_seats
            if seat.phase == "offered" and seat.due <= now and seat.client not in self._polls
        ]
        if missed:
            self.pool.remove(missed)
            await self._remove_members(missed)

    async def finish_work(self, client: int) -> None:
        """After a client's work, remove it from the pool if the pool is full and others wait."""
        if self.pool.finish_work(client, self.clock.now()):
            await self._remove_members([client])

    def revoke(self, client: ClientRecord) -> None:
        """Remove a revoked client and end its poll."""
        self.pool.remove([client.index])
        poll = self._polls.get(client.index)
        if poll is not None:
            poll.end()

    async def _remove_members(self, clients: Sequence[int]) -> None:
        parts = [tuple(clients[at : at + MAX_NAMED]) for at in range(0, len(clients), MAX_NAMED)]
        signals = [MembersLeft(client_indices=part) for part in parts]
        await self.store.leave(clients, encode_signals(self.store, *signals))

    def on_members_left(self, clients: Sequence[int]) -> None:
        """Remove clients that stopped waiting at another replica."""
        self.pool.remove(clients)
        self.wake(clients)  # Clients with an open poll here enter this replica's pool again.

    def on_change(self, run: ServedRun, change: Change) -> None:
        """Record which clients may have a seat in a run, and wake the clients that were drawn."""
        self.note_seats(run.run_id, change.offered)
        if change.reloaded or change.ended or change.resumed:
            self.sync_run(run)
        if change.reloaded or change.ended or change.finished is not None:
            self._prune_seats(run)

    def sync_run(self, run: ServedRun) -> None:
        """Update the pool after a run was added, loaded, resumed or ended; record its seats."""
        # A paused run keeps its places, so that its clients are available when it resumes.
        has_places = run.state.running or run.state.paused
        if has_places is not self.pool.has_run(run.run_id):
            if has_places:
                seats = run.spec.participation.clients_per_round
                places = max(run.machine.min_clients, seats * _PLACES_PER_SEAT, _MIN_PLACES)
                self.pool.add_run(run.run_id, places, again=run.state.started_at is not None)
            else:
                self.pool.remove_run(run.run_id)
            self.wake()
        self.note_seats(run.run_id, [s.client for s in run.state.seats if s.phase != "done"])

    def remove_run(self, run: ServedRun) -> None:
        """Remove a deleted run."""
        self.pool.remove_run(run.run_id)
        self._forget_seats(run)
        self.wake()

    def runs_of(self, client: int) -> list[ServedRun]:
        """Return the runs that may have a seat for a client."""
        run_ids = self._possible_seats.get(client, ())
        return [self._runs[run_id] for run_id in run_ids if run_id in self._runs]

    def note_seats(self, run_id: str, clients: Sequence[int]) -> None:
        """Record that a run may have seats for these clients, and wake their polls."""
        for client in clients:
            self._possible_seats.setdefault(client, set()).add(run_id)
        self.wake(clients)

    def _prune_seats(self, run: ServedRun) -> None:
        if run.is_stale:
            return  # Another replica may have signalled a seat that this copy does not have yet.
        seated = {seat.client for seat in run.state.seats if seat.phase != "done"}
        self._forget_seats(run, keep=seated)

    def _forget_seats(self, run: ServedRun, keep: Set[int] = frozenset()) -> None:
        for client in self._possible_seats.keys() - keep:
            self._possible_seats[client].discard(run.run_id)
            if not self._possible_seats[client]:
                del self._possible_seats[client]

    def wake(self, clients: Iterable[int] | None = None) -> None:
        """Wake the polls of clients; None wakes all."""
        for client in self._polls.keys() if clients is None else self._polls.keys() & clients:
            self._polls[client].woken.set()

    @contextmanager
    def stopping(self, run: ServedRun) -> Iterator[None]:
        """Assign no new work of a run inside the ``with`` block; updates are still accepted."""
        self._stopping.add(run.run_id)
        try:
            yield
        finally:
            self._stopping.discard(run.run_id)

    def drain(self) -> None:
        """Answer open polls, and all later ones, immediately."""
        self._draining = True
        self.wake()


def _visible(client: ClientRecord, runs: Mapping[str, R]) -> list[R]:
    if client.runs is None:
        return [*runs.values()]
    return [run for run_id, run in runs.items() if may_see(client.runs, run_id)]
