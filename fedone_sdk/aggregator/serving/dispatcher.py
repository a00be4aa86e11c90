"""Gives clients their work, waiting for it with them, and takes it back."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from fedone_sdk.aggregator.cluster.signals import MAX_NAMED, Joined, Left, written
from fedone_sdk.aggregator.rounds.events import (
    Accepted,
    Assigned,
    DeadlineExtended,
    Effect,
    RenewalRequested,
    RoundFinished,
    RunEnded,
    SeatOffered,
    UnfitCleared,
    UpdateArrived,
    WorkDeclined,
    WorkRequested,
)
from fedone_sdk.aggregator.rounds.seats import timed_seats
from fedone_sdk.aggregator.rounds.state import Seat
from fedone_sdk.aggregator.runtime.shielded import run_shielded
from fedone_sdk.aggregator.serving.pool import STAY_S, Pool, TurnedAway
from fedone_sdk.aggregator.serving.run import CaughtUp, ServedRun
from fedone_sdk.clock import Clock
from fedone_sdk.errors import ProblemError
from fedone_sdk.messages import (
    AlphaAssignment,
    AlphaUpdate,
    Claim,
    Decline,
    LossesAssignment,
    LossesUpdate,
    Receipt,
    Renewal,
    RunDevices,
    UnfitDevices,
)
from fedone_sdk.stores import ClientRecord, ClosedWork, Member, Store

__all__ = ["Dispatcher"]

_FEWEST_PLACES = 64
_PLACES_PER_SEAT = 4
_MOST_REASONS = 5
_MAX_REASON_CHARS = 200
"""The longest reason why a client does not fit a run that is kept."""
_SOON = TurnedAway(retry_after_s=0.0)
"""Nobody else wants the place: come back at once."""


class _Poll:
    """A client's open request for work."""

    def __init__(self) -> None:
        self.news = asyncio.Event()
        self.over = False

    def end(self) -> None:
        """Lets it be answered now."""
        self.over = True
        self.news.set()


class Dispatcher:
    """The clients' side of the runs: who waits, who works, and what comes back.

    Args:
        store: Keeps who waits, and how work ended.
        clock: Tells the time.
        runs: The runs that are served, by id.
        refresh: Reads what other replicas may have changed in any run.
        prepare: Makes a run ready to give work.

    Attributes:
        pool: Who waits.
    """

    def __init__(
        self,
        *,
        store: Store,
        clock: Clock,
        runs: Mapping[str, ServedRun],
        refresh: Callable[[], Awaitable[None]],
        prepare: Callable[[ServedRun], Awaitable[None]],
    ) -> None:
        self.pool = Pool()
        self._store = store
        self._clock = clock
        self._runs = runs
        self._refresh = refresh
        self._prepare = prepare
        self._polls: dict[int, _Poll] = {}
        # Enrolment index -> the runs that may have a seat for this client.
        self._offers: dict[int, set[str]] = {}
        self._offered_by: dict[str, set[int]] = {}
        self._draining = False
        self._closing: set[str] = set()
        self._turn = 0

    @property
    def num_polls(self) -> int:
        """How many requests for work are open."""
        return len(self._polls)

    # Asking for work

    async def claim(
        self,
        client: ClientRecord,
        message: Claim,
        runs: Callable[[], Sequence[ServedRun]],
        ended: Callable[[], bool] = lambda: False,
    ) -> AlphaAssignment | LossesAssignment | TurnedAway:
        """Gives work, waiting for it up to the client's ``wait_s``.

        A client's second request for work ends its first.

        Args:
            client: Who asks.
            message: What it says of itself.
            runs: The runs that it may and wants to work for, as there are now.
            ended: Whether there are others that have ended and are not served.

        Raises:
            ProblemError: ``run_ended`` when all of them have ended, ``model_mismatch`` when the
                one that has a seat for the client scores with another model.
        """
        until = asyncio.get_running_loop().time() + message.wait_s
        if message.changed:
            for run_id in self._barred(client.index):
                await self._runs[run_id].apply(UnfitCleared(client=client.index))
        with self._polling(client.index) as poll:
            while True:
                poll.news.clear()
                open_to_it = runs()
                _check_open(open_to_it, ended)
                if poll.over:
                    return _SOON  # It asks again elsewhere, or may not ask any more.
                try:
                    assignment = await self._offered(client.index, message)
                except ProblemError as exc:
                    if exc.code == "model_mismatch":  # It is not to be drawn for this again.
                        self.pool.leave([client.index])
                        await run_shielded(self._left([client.index]), of=self._store)
                    raise
                if assignment is not None:
                    return assignment
                if self._draining:
                    return _SOON
                turned_away = await self._wait_in_pool(client, message, open_to_it)
                if turned_away is not None:
                    return turned_away
                if poll.news.is_set():
                    continue
                try:
                    async with asyncio.timeout_at(until):
                        await poll.news.wait()
                except TimeoutError:
                    if not poll.news.is_set():
                        break
        tired = self.pool.rest(client.index, self._clock.now())
        if tired is None:
            return _SOON
        await run_shielded(self._left([client.index]), of=self._store)
        return tired

    @contextmanager
    def _polling(self, client: int) -> Iterator[_Poll]:
        before = self._polls.get(client)
        if before is not None:
            before.end()
        poll = self._polls[client] = _Poll()
        try:
            yield poll
        finally:
            if self._polls.get(client) is poll:
                del self._polls[client]

    async def _wait_in_pool(
        self, client: ClientRecord, message: Claim, runs: Sequence[ServedRun]
    ) -> TurnedAway | None:
        """Lets a client wait for runs, and gives it a seat that nobody else was there for."""
        entered = self.pool.enter(
            client.index,
            message.num_examples,
            message.run_id,
            client.runs,
            self._clock.now(),
            self._barred(client.index),
        )
        if isinstance(entered, TurnedAway):
            return entered
        if entered is not None:
            await run_shielded(self._join_or_leave(entered), of=self._store)
        await self._seat(runs)
        return None

    async def _join_or_leave(self, member: Member) -> None:
        # First in the store: a draw that knows of this client must be the same after a crash.
        try:
            await self._join(member)
        except Exception:
            self.pool.leave([member.client_index])
            raise

    async def gather(self, clients: Iterable[tuple[ClientRecord, int]]) -> None:
        """Lets clients wait without a request of their own, each with the examples that it holds.

        A pool's places are for those who ask; whoever gathers clients has room for them.
        """
        until = self._clock.now() + STAY_S
        for client, held in clients:
            member = Member(client_index=client.index, num_examples=held, run_id=None, until=until)
            await self._join(member)
            self.take_in(member, client)
        await self._seat(list(self._runs.values()))

    async def _join(self, member: Member) -> None:
        joined = Joined(
            client_index=member.client_index,
            num_examples=member.num_examples,
            run_id=member.run_id,
            until=member.until,
        )
        await self._store.join(member, written(self._store, joined))

    async def _seat(self, runs: Sequence[ServedRun]) -> None:
        """Gives the free seats of runs to those who wait."""
        # Begun with another run each time: the first ones must not take all.
        self._turn += 1
        vacant = [run for run in runs if run.machine.needs_seating(run.state)]
        for at in range(len(vacant)):
            await vacant[(at + self._turn) % len(vacant)].seat()

    async def _offered(
        self, client: int, message: Claim
    ) -> AlphaAssignment | LossesAssignment | None:
        """The work of a seat that a run has for this client.

        Raises:
            ProblemError: ``model_mismatch`` where no run has any, and one scores with another
                model.
        """
        mismatch: ProblemError | None = None
        for run_id in tuple(self._offers.get(client, ())):
            run = self._runs.get(run_id)
            if run is None:
                self._forget(client, run_id)
                continue
            await run.checked.wait()
            await run.catch_up()
            seat = run.state.seat_of(client)
            if seat is None:
                self._forget(client, run_id)
                continue
            if not run.state.running:
                continue  # paused: the seat is kept
            if run_id in self._closing and seat.phase == "offered":
                continue  # about to stop: nothing new is begun
            await self._prepare(run)
            asked = WorkRequested(
                client=client,
                assignment_id=uuid.uuid4().hex,
                own_model=message.own_model,
                model=message.model,
            )
            try:
                effects = await run.apply(asked)
            except ProblemError as exc:
                if exc.code != "model_mismatch":
                    raise
                mismatch = exc
                continue
            for effect in effects:
                if isinstance(effect, Assigned):
                    self.pool.work(client, run_id)
                    return effect.assignment
        if mismatch is not None:
            raise mismatch
        return None

    def _forget(self, client: int, run_id: str) -> None:
        offers = self._offers.get(client, set())
        offers.discard(run_id)
        self._offered_by.get(run_id, set()).discard(client)
        if not offers:
            self._offers.pop(client, None)

    # Work that is out

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
        held = await self._held(client, assignment_id)
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
                if self.pool.served(client.index, self._clock.now()):
                    await self._left([client.index])
                return next(e.receipt for e in effects if isinstance(e, Accepted))
        closed = await self._closed(client, assignment_id)
        if closed.receipt is None:
            raise ProblemError(
                "assignment_expired", f"assignment {assignment_id} has ended: {closed.outcome}"
            )
        if closed.body_sha256 != body_sha256:
            raise ProblemError(
                "update_conflict", f"another update was accepted for assignment {assignment_id}"
            )
        return Receipt.model_validate_json(closed.receipt)

    async def renew(self, client: ClientRecord, assignment_id: str) -> Renewal:
        """Gives a client that is still at work another full deadline."""
        run, _ = await self.working(client, assignment_id)
        effects = await run.apply(RenewalRequested(assignment_id=assignment_id))
        return next(
            Renewal(deadline_s=e.deadline_s) for e in effects if isinstance(e, DeadlineExtended)
        )

    async def decline(self, client: ClientRecord, assignment_id: str, message: Decline) -> None:
        """Takes work back that a client cannot do."""
        run, _ = await self.working(client, assignment_id)
        await run.apply(
            WorkDeclined(
                assignment_id=assignment_id,
                reason=message.reason[:_MAX_REASON_CHARS] if message.unfit else message.reason,
                usage=message.usage,
                unfit=message.unfit,
            )
        )

    async def working(self, client: ClientRecord, assignment_id: str) -> tuple[ServedRun, Seat]:
        """The seat in which a client does this work.

        Raises:
            ProblemError: ``not_found``, or ``assignment_expired``.
        """
        held = await self._held(client, assignment_id)
        if held is not None:
            return held
        await self._closed(client, assignment_id)
        raise ProblemError("assignment_expired", f"assignment {assignment_id} has ended")

    async def _closed(self, client: ClientRecord, assignment_id: str) -> ClosedWork:
        """How a client's work ended.

        Raises:
            ProblemError: ``not_found``.
        """
        closed = await self._store.closed(assignment_id)
        if closed is None or closed.client_index != client.index:
            raise ProblemError("not_found", f"you have no assignment {assignment_id}")
        return closed

    async def _held(
        self, client: ClientRecord, assignment_id: str
    ) -> tuple[ServedRun, Seat] | None:
        found = self._find(client, assignment_id)
        if found is None and self._store.shared:
            await self._refresh()  # Another replica may have given it out a moment ago.
            found = self._find(client, assignment_id)
        if found is not None and not found[0].checked.is_set():
            await found[0].checked.wait()
            found = self._find(client, assignment_id)
        return found

    def _find(self, client: ClientRecord, assignment_id: str) -> tuple[ServedRun, Seat] | None:
        for run_id in self._offers.get(client.index, ()):
            run = self._runs.get(run_id)
            seat = None if run is None else run.state.seat_with(assignment_id)
            if run is not None and seat is not None and seat.client == client.index:
                return run, seat
        return None

    # Who waits

    def available(self, run: ServedRun) -> Mapping[int, int]:
        """Who could take a seat of a run now: enrolment index -> examples held."""
        busy = {
            seat.client
            for other in self._runs.values()
            if other is not run
            for seat in other.state.seats
            if seat.phase == "working"
        }
        self.pool.bar(run.run_id, run.state.unfit)
        waiting = self.pool.waiting(run.run_id, self._clock.now())
        if not busy:
            return waiting
        return {client: held for client, held in waiting.items() if client not in busy}

    def fit(self, run: ServedRun, *, reasons: bool) -> RunDevices:
        """How many of the clients that are here fit a run.

        Args:
            run: The run.
            reasons: Whether to say why the others do not, in their own words.
        """
        state = run.state
        here = self.pool.members(run.run_id, self._clock.now())
        unfit = Counter(state.unfit[client] for client in here if client in state.unfit)
        return RunDevices(
            connected=len(here),
            fit=len(here) - unfit.total(),
            unfit=tuple(
                UnfitDevices(reason=reason, devices=count)
                for reason, count in unfit.most_common(_MOST_REASONS)
            )
            if reasons
            else (),
        )

    def _barred(self, client: int) -> frozenset[str]:
        """The runs that a client does not fit."""
        return frozenset(run_id for run_id, run in self._runs.items() if client in run.state.unfit)

    def take_in(self, member: Member, client: ClientRecord) -> None:
        """Takes note of a client that waits, as the store or another replica knows."""
        self.pool.take(member, client.runs, self._barred(client.index))

    def presume(self, member: Member) -> Member:
        """A member after nobody could be reached for a while: its time begins anew."""
        return replace(member, until=max(member.until, self._clock.now() + STAY_S))

    async def miss(self, run: ServedRun) -> None:
        """Stops counting on clients that did not come for their seat in time."""
        now = self._clock.now()
        missed = [
            seat.client
            for seat in timed_seats(run.state)
            if seat.phase == "offered" and seat.due <= now and seat.client not in self._polls
        ]
        if missed:
            self.pool.leave(missed)
            await self._left(missed)

    def shut_out(self, client: ClientRecord) -> None:
        """Lets a client that was revoked wait no longer."""
        self.pool.leave([client.index])
        poll = self._polls.get(client.index)
        if poll is not None:
            poll.end()

    async def _left(self, clients: Sequence[int]) -> None:
        left = (
            Left(client_indices=tuple(clients[at : at + MAX_NAMED]))
            for at in range(0, len(clients), MAX_NAMED)
        )
        await self._store.leave(clients, written(self._store, *left))

    def left(self, clients: Sequence[int]) -> None:
        """Takes note of clients that do not wait at another replica any more."""
        self.pool.leave(clients)
        for client in clients:
            poll = self._polls.get(client)
            if poll is not None:
                poll.news.set()  # It waits here now, and takes its place again.

    # What happens to runs

    def notice(self, run: ServedRun, effect: Effect | CaughtUp) -> None:
        """Wakes whom an effect concerns."""
        if isinstance(effect, SeatOffered):
            self.offer(run.run_id, [effect.client])
        elif isinstance(effect, (CaughtUp, RunEnded)):
            self.look_at(run)
        if isinstance(effect, (CaughtUp, RoundFinished, RunEnded)):
            self._forget_offers(run)

    def look_at(self, run: ServedRun) -> None:
        """Takes note of where a run stands: it was added, taken up, resumed, moved or ended."""
        # Whoever waits for a paused run is drawn from as soon as it goes on.
        waited_for = run.state.running or run.state.paused
        if waited_for and not self.pool.is_open(run.run_id):
            part = run.spec.participation
            places = max(
                run.machine.min_clients, part.clients_per_round * _PLACES_PER_SEAT, _FEWEST_PLACES
            )
            self.pool.open(run.run_id, places, again=run.state.started_at is not None)
            self.wake()
        elif not waited_for and self.pool.is_open(run.run_id):
            self.pool.shut(run.run_id)
            self.wake()
        self.offer(run.run_id, [s.client for s in run.state.seats if s.phase != "done"])

    def drop(self, run: ServedRun) -> None:
        """Forgets a run that was deleted."""
        if self.pool.is_open(run.run_id):
            self.pool.shut(run.run_id)
        for client in tuple(self._offered_by.pop(run.run_id, ())):
            self._forget(client, run.run_id)
        self.wake()

    def offer(self, run_id: str, clients: Sequence[int]) -> None:
        """Tells clients that a run may have a seat for them."""
        for client in clients:
            self._offers.setdefault(client, set()).add(run_id)
            self._offered_by.setdefault(run_id, set()).add(client)
            poll = self._polls.get(client)
            if poll is not None:
                poll.news.set()

    def _forget_offers(self, run: ServedRun) -> None:
        """Drops who had a seat and has none any more: most of them are not heard of for long."""
        if run.behind:
            return  # A seat may have been heard of that this state does not know yet.
        seated = {seat.client for seat in run.state.seats if seat.phase != "done"}
        for client in self._offered_by.get(run.run_id, set()) - seated:
            self._forget(client, run.run_id)

    def wake(self) -> None:
        """Lets everybody who waits look again."""
        for poll in self._polls.values():
            poll.news.set()

    @contextmanager
    def closing(self, run: ServedRun) -> Iterator[None]:
        """Gives out no new work of a run; work that is out can be returned."""
        self._closing.add(run.run_id)
        try:
            yield
        finally:
            self._closing.discard(run.run_id)

    def drain(self) -> None:
        """Answers everybody who waits, and lets nobody wait any more."""
        self._draining = True
        self.wake()


def _check_open(runs: Sequence[ServedRun], ended: Callable[[], bool]) -> None:
    if any(run.state.running or run.state.paused for run in runs):
        return
    if runs or ended():
        raise ProblemError("run_ended", "all runs that you could work for have ended")
