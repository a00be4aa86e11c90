"""Who waits for work: a small pool for each run, and everybody else is told when to come back.

A round needs K* clients, however many there are. So a run keeps as many waiting as it needs to
draw from, and sends the others away with a ``Retry-After`` that makes them come back about as
fast as places become free. A place is held for one long poll or one piece of work while others
are waiting for it; since the pauses are random, every device has the same chance to get one, and
a uniform draw from the pool is a uniform draw from all devices.
"""

from __future__ import annotations

import math
import random
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fedone_sdk.aggregator.access.tokens import may_see
from fedone_sdk.stores import Member

__all__ = ["MAX_RETRY_AFTER_S", "Pool", "STAY_S", "TurnedAway"]

MAX_RETRY_AFTER_S = 900.0
"""The longest pause that a device is told to make, seconds."""

_MIN_RETRY_AFTER_S = 1.0
_HOLD_S = 25.0
"""About how long a place is held: one long poll."""
STAY_S = 600.0
"""How long a client that is not heard of stays in the pool, seconds."""
_RATE_WINDOW_S = 30.0
_HEARD_S = 10.0
"""How long what another replica said of its clients counts, seconds."""
_LOBBY = 64
"""Clients that may wait while there is no run for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnedAway:
    """There is no work now; come back after so many seconds."""

    retry_after_s: float


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A member, and the patterns of the runs that it may work for; None is all runs."""

    member: Member
    patterns: Sequence[str] | None

    def may(self, run_id: str) -> bool:
        return self.member.run_id in (None, run_id) and may_see(self.patterns, run_id)


class Pool:
    """The clients that wait for work of a number of runs.

    A client waits for every run that it may work for and that has a place. Whoever is in the
    pool already keeps its places until they are taken from it.

    Args:
        rng: Spreads the pauses.
    """

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()
        self._members: dict[int, _Waiting] = {}
        self._capacities: dict[str, int] = {}
        self._places: dict[str, dict[int, int]] = {}
        # Nobody's time in the pool is over before that.
        self._fresh_until = 0.0
        # Who was sent away, and when it should be back.
        self._away: dict[int, float] = {}
        self._swept = 0.0
        # Who made room after its work, and when that is forgotten.
        self._served: dict[int, float] = {}
        # Other replicas: clients sent away there, places that become free, until when that counts.
        self._elsewhere: dict[str, tuple[int, float, float]] = {}
        self._opened: float | None = None
        self._rate = 0.0
        self._rate_at = 0.0

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, client: int) -> bool:
        return client in self._members

    @property
    def away(self) -> int:
        """How many clients were sent away and are expected back."""
        return len(self._away)

    def rate(self, now: float) -> float:
        """Pieces of work that ended here a second, about."""
        return self._rate_now(now)

    def hear(self, replica: str, away: int, rate: float, now: float) -> None:
        """Takes note of who waits outside at another replica: those have the same right to places.

        Args:
            replica: Which one.
            away: Clients that it has sent away and expects back.
            rate: Pieces of work that ended there a second.
            now: Seconds since the epoch.
        """
        self._elsewhere[replica] = (away, rate, now + _HEARD_S)

    @property
    def _num_outside(self) -> int:
        return len(self._away) + sum(away for away, _, _ in self._elsewhere.values())

    def open(self, run_id: str, capacity: int, *, again: bool = False) -> None:
        """Gives a run its places.

        Args:
            run_id: The run.
            capacity: How many it has.
            again: Whether it goes on after it was stopped. Members that may work for it have their
                places at once then: whom it draws must not depend on who asks first. A new run
                waits for requests; some members may be gone.
        """
        self._capacities[run_id] = capacity
        if run_id not in self._places:
            waiting = self._members.items() if again else ()
            self._places[run_id] = {
                client: one.member.num_examples for client, one in waiting if one.may(run_id)
            }

    def shut(self, run_id: str) -> None:
        """Takes a run's places away."""
        self._capacities.pop(run_id, None)
        self._places.pop(run_id, None)

    def is_open(self, run_id: str) -> bool:
        """Whether a run has places."""
        return run_id in self._places

    def waiting(self, run_id: str, now: float) -> Mapping[int, int]:
        """Enrolment index -> examples held, of who waits for a run."""
        places = self._places.get(run_id, {})
        if now >= self._fresh_until:
            until = [one.member.until for one in self._members.values()]
            self._fresh_until = min(until, default=math.inf)
        if now < self._fresh_until:
            return dict(places)
        return {
            client: held
            for client, held in places.items()
            if self._members[client].member.until > now
        }

    def members(self, run_id: str, now: float) -> list[int]:
        """The clients here that may work for a run, those without a place among them."""
        return [
            client
            for client, one in self._members.items()
            if one.member.until > now and one.may(run_id)
        ]

    def bar(self, run_id: str, clients: Iterable[int]) -> None:
        """Takes the places of clients that do not fit a run, for others."""
        places = self._places.get(run_id)
        if places:
            for client in places.keys() & set(clients):
                del places[client]

    def enter(
        self,
        client: int,
        num_examples: int,
        run_id: str | None,
        patterns: Sequence[str] | None,
        now: float,
        barred: Container[str] = (),
    ) -> Member | TurnedAway | None:
        """Lets a client wait, or sends it away.

        Args:
            client: Its enrolment index.
            num_examples: Examples that it holds now.
            run_id: The only run that it wants to work for; None is any.
            patterns: Of the runs that it may work for; None is all.
            now: Seconds since the epoch.
            barred: Runs that it does not fit.

        Returns:
            The new member, to be kept in the store; None for a member that the store knows; or
            when to come back.
        """
        if self._opened is None:
            self._opened = now
        self._forget_lost(now)
        member = Member(
            client_index=client, num_examples=num_examples, run_id=run_id, until=now + STAY_S
        )
        waiting = _Waiting(member, patterns)
        known = self._members.get(client)
        may = [r for r in self._places if waiting.may(r) and r not in barred]
        if known is None:
            came_back = self._away.pop(client, None) is not None
            has_worked = client in self._served
            self._served.pop(client, None)
            free = [r for r in may if self._has_place(r, has_worked and not came_back)]
            if not free and (may or len(self._members) >= _LOBBY):
                return self._send_away(client, now)
        else:
            free = [r for r in may if client in self._places[r] or self._has_place(r, False)]
            for place in free:
                self._places[place][client] = num_examples
            before = known.member
            same = before.num_examples == num_examples and before.run_id == run_id
            if same and before.until > now + STAY_S / 2:
                return None
        self._take_places(waiting, free)
        return member

    def _has_place(self, run_id: str, has_worked: bool) -> bool:
        # Whoever has just worked steps back for the others, unless too few are here to draw from.
        capacity = self._capacities.get(run_id, 0)
        room = capacity - len(self._places.get(run_id, ()))
        return room > (capacity // 2 if has_worked and self._num_outside else 0)

    def _take_places(self, waiting: _Waiting, run_ids: Iterable[str]) -> None:
        client = waiting.member.client_index
        self.leave([client])
        self._members[client] = waiting
        self._fresh_until = min(self._fresh_until, waiting.member.until)
        for run_id in run_ids:
            self._places[run_id][client] = waiting.member.num_examples

    def take(
        self, member: Member, patterns: Sequence[str] | None, barred: Container[str] = ()
    ) -> None:
        """Takes in a member that the store or another replica knows of.

        Args:
            member: Who waits.
            patterns: Of the runs that it may work for; None is all.
            barred: Runs that it does not fit.
        """
        waiting = _Waiting(member, patterns)
        may = [r for r in self._places if waiting.may(r) and r not in barred]
        self._take_places(waiting, may)

    def leave(self, clients: Iterable[int]) -> None:
        """Frees clients' places."""
        for client in clients:
            self._members.pop(client, None)
            for places in self._places.values():
                places.pop(client, None)

    def work(self, client: int, run_id: str) -> None:
        """A client works for a run: others may have its places in the other runs."""
        for other, places in self._places.items():
            if other != run_id:
                places.pop(client, None)

    def rest(self, client: int, now: float) -> TurnedAway | None:
        """A client has waited in vain: it makes room where others wait for its place."""
        self._forget_lost(now)
        if not self._num_outside:
            return None
        self.leave([client])
        return self._send_away(client, now)

    def served(self, client: int, now: float) -> bool:
        """A client has worked; returns whether it has made room for others."""
        self._count(now)
        self._forget_lost(now)
        if not self._num_outside or client not in self._members:
            return False
        self.leave([client])
        self._served[client] = now + MAX_RETRY_AFTER_S
        return True

    # Pace

    def _send_away(self, client: int, now: float) -> TurnedAway:
        retry_after_s = self._mean_pause(now) * self._rng.uniform(0.5, 1.5)
        self._away[client] = now + retry_after_s
        return TurnedAway(retry_after_s=retry_after_s)

    def _mean_pause(self, now: float) -> float:
        """Seconds after which those who are away come back as fast as places become free."""
        capacity = sum(self._capacities.values())
        # Half as many again: some come for nothing, and too few would make rounds wait.
        rate = self._rate_now(now) + sum(rate for _, rate, _ in self._elsewhere.values())
        wanted = 1.5 * max(capacity / _HOLD_S, rate)
        pause = (self._num_outside + 1) / wanted if wanted else MAX_RETRY_AFTER_S
        # The rate is known as well as it was watched long.
        watched = now - (now if self._opened is None else self._opened) + 10.0
        return max(min(pause, watched, MAX_RETRY_AFTER_S / 1.5), _MIN_RETRY_AFTER_S)

    def _count(self, now: float) -> None:
        self._rate = self._rate_now(now) + 1.0 / _RATE_WINDOW_S
        self._rate_at = now

    def _rate_now(self, now: float) -> float:
        """Pieces of work that ended a second, over about the last half minute."""
        return self._rate * max(0.0, 1.0 - (now - self._rate_at) / _RATE_WINDOW_S)

    def _forget_lost(self, now: float) -> None:
        """Stops counting on those who are not heard of: they have gone, or ask another replica."""
        if self._elsewhere:
            self._elsewhere = {r: told for r, told in self._elsewhere.items() if told[2] > now}
        if now > self._swept + 10.0:
            self._swept = now
            self.leave([c for c, one in self._members.items() if one.member.until <= now])
            late = MAX_RETRY_AFTER_S / 10
            self._away = {c: back for c, back in self._away.items() if back + late > now}
            self._served = {c: until for c, until in self._served.items() if until > now}
