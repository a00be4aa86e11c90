"""The pool of waiting clients: a limited number per run; other clients get a ``Retry-After``.

The clients of a round are drawn from the clients that have a place in the run's pool. If no place
is free, a client is turned away: it claims again after a random pause. Pauses are so long that
clients return a little faster than places become free. While clients are turned away, each client
with a place gives it up after one long poll or one assignment. Because pauses are random, every
device has the same chance of a place.
"""

from __future__ import annotations

import math
import random
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fedone_sdk.aggregator.authority import may_see
from fedone_sdk.stores import Member

MAX_RETRY_AFTER_S = 900.0
"""Maximal ``Retry-After``, in seconds."""

_MIN_RETRY_AFTER_S = 1.0
_POLL_S = 25.0
"""Typical time for which a client keeps its place, in seconds: the duration of a long poll."""
MEMBER_TTL_S = 600.0
"""Time after which a client leaves the pool unless it claims again, in seconds."""
_RATE_WINDOW_S = 30.0
_REPLICA_TTL_S = 10.0
"""Time for which another replica's report (`record_replica`) is valid, in seconds."""
_MAX_IDLE = 64
"""Maximal number of clients that wait while no run can offer them a seat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryLater:
    """There is no work now; the client retries after `retry_after_s` seconds."""

    retry_after_s: float


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A client in the pool, and the patterns of the runs that it may work for (None: all runs)."""

    member: Member
    patterns: Sequence[str] | None

    def may_work_for(self, run_id: str) -> bool:
        return self.member.run_id in (None, run_id) and may_see(self.patterns, run_id)


class ClientPool:
    """The clients that wait for work, with a limited number of places per run.

    A *member* is a client in the pool. In each run that it may work for, it gets a place if a place
    is free. With a place it can be drawn for the run's rounds. When it starts to work for a run, it
    loses its places in the other runs.
    """

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()
        self._members: dict[int, _Waiting] = {}
        self._capacities: dict[str, int] = {}
        self._places: dict[str, dict[int, int]] = {}
        self._next_expiry = 0.0  # of a member
        # Client that was turned away -> time at which it is expected back.
        self._away: dict[int, float] = {}
        self._swept_at = 0.0
        # Client that has just worked -> time until which it lets other clients go first (`enter`).
        self._after_work: dict[int, float] = {}
        # Replica -> number of clients turned away there, finished assignments per second, expiry.
        self._other_replicas: dict[str, tuple[int, float, float]] = {}
        self._first_claim_at: float | None = None
        self._rate = 0.0
        self._rate_at = 0.0

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, client: int) -> bool:
        return client in self._members

    @property
    def num_away(self) -> int:
        """Number of clients that were turned away and are expected back."""
        return len(self._away)

    def record_replica(self, replica: str, away: int, rate: float, now: float) -> None:
        """Record another replica's number of clients turned away, and its rate of finished work."""
        self._other_replicas[replica] = (away, rate, now + _REPLICA_TTL_S)

    @property
    def _num_outside(self) -> int:
        """Number of clients that all replicas together have turned away."""
        return len(self._away) + sum(away for away, _, _ in self._other_replicas.values())

    def add_run(self, run_id: str, capacity: int, *, again: bool = False) -> None:
        """Add a run with `capacity` places for waiting clients.

        In a new run a member gets a place when it claims. If the run continues (`again`), members
        get places at once, so that draws do not depend on the order of the claims.
        """
        self._capacities[run_id] = capacity
        if run_id not in self._places:
            members = self._members.items() if again else ()
            self._places[run_id] = {
                client: waiting.member.num_examples
                for client, waiting in members
                if waiting.may_work_for(run_id)
            }

    def remove_run(self, run_id: str) -> None:
        """Remove a run and its places."""
        self._capacities.pop(run_id, None)
        self._places.pop(run_id, None)

    def has_run(self, run_id: str) -> bool:
        """Whether a run was added to the pool."""
        return run_id in self._places

    def waiting(self, run_id: str, now: float) -> Mapping[int, int]:
        """Return the clients with a place in a run: enrolment index -> number of examples."""
        places = self._places.get(run_id, {})
        if now >= self._next_expiry:
            until = [waiting.member.until for waiting in self._members.values()]
            self._next_expiry = min(until, default=math.inf)
        if now < self._next_expiry:
            return dict(places)
        members = self._members
        return {c: count for c, count in places.items() if members[c].member.until > now}

    def members(self, run_id: str, now: float) -> list[int]:
        """Return the members that may work for a run, with or without a place."""
        return [
            client
            for client, waiting in self._members.items()
            if waiting.member.until > now and waiting.may_work_for(run_id)
        ]

    def remove_places(self, run_id: str, clients: Iterable[int]) -> None:
        """Remove the places of clients in a run, so that they are not drawn."""
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
        barred_runs: Container[str] = (),
    ) -> Member | RetryLater | None:
        """Add a client to the pool, without a place in `barred_runs`; or turn it away.

        Returns:
            A new or changed member, which the caller must store; None if the stored member is
            still valid; a `RetryLater` if the client is turned away.
        """
        if self._first_claim_at is None:
            self._first_claim_at = now
        self._expire(now)
        member = Member(
            client_index=client, num_examples=num_examples, run_id=run_id, until=now + MEMBER_TTL_S
        )
        waiting = _Waiting(member, patterns)
        known = self._members.get(client)
        open_runs = self._open_runs(waiting, barred_runs)
        if known is None:
            returned = self._away.pop(client, None) is not None
            has_worked = self._after_work.pop(client, None) is not None
            # After work, a client leaves half of the places free while others are turned away.
            yields = has_worked and not returned and self._num_outside > 0
            free = [r for r in open_runs if self._has_place(r, share=0.5 if yields else 1.0)]
            if not free and (open_runs or len(self._members) >= _MAX_IDLE):
                return self._turn_away(client, now)
        else:
            free = [r for r in open_runs if client in self._places[r] or self._has_place(r)]
            for run in free:
                self._places[run][client] = num_examples
            before = known.member
            same = before.num_examples == num_examples and before.run_id == run_id
            if same and before.until > now + MEMBER_TTL_S / 2:
                return None
        self._add_to_runs(waiting, free)
        return member

    def _open_runs(self, waiting: _Waiting, barred_runs: Container[str]) -> list[str]:
        return [run for run in self._places if run not in barred_runs and waiting.may_work_for(run)]

    def _has_place(self, run_id: str, share: float = 1.0) -> bool:
        """Whether clients hold less than this share of the run's places."""
        return len(self._places[run_id]) < math.ceil(share * self._capacities[run_id])

    def _add_to_runs(self, waiting: _Waiting, run_ids: Iterable[str]) -> None:
        client = waiting.member.client_index
        self.remove([client])
        self._members[client] = waiting
        self._next_expiry = min(self._next_expiry, waiting.member.until)
        for run_id in run_ids:
            self._places[run_id][client] = waiting.member.num_examples

    def add(
        self, member: Member, patterns: Sequence[str] | None, barred_runs: Container[str] = ()
    ) -> None:
        """Add a member that the store or another replica reported."""
        waiting = _Waiting(member, patterns)
        self._add_to_runs(waiting, self._open_runs(waiting, barred_runs))

    def remove(self, clients: Iterable[int]) -> None:
        """Remove clients from the pool."""
        for client in clients:
            self._members.pop(client, None)
            for places in self._places.values():
                places.pop(client, None)

    def start_work(self, client: int, run_id: str) -> None:
        """Remove a client's places in other runs, because it works for this run."""
        for other, places in self._places.items():
            if other != run_id:
                places.pop(client, None)

    def time_out(self, client: int, now: float) -> RetryLater | None:
        """Turn a client away after its poll timed out, if other clients wait for a place."""
        self._expire(now)
        if not self._num_outside:
            return None
        self.remove([client])
        return self._turn_away(client, now)

    def finish_work(self, client: int, now: float) -> bool:
        """Record a finished assignment; return whether the client has left the pool."""
        self._rate, self._rate_at = self.rate(now) + 1.0 / _RATE_WINDOW_S, now
        self._expire(now)
        if not self._num_outside or client not in self._members:
            return False
        self.remove([client])
        self._after_work[client] = now + MAX_RETRY_AFTER_S
        return True

    def _turn_away(self, client: int, now: float) -> RetryLater:
        retry_after_s = self._mean_retry_s(now) * self._rng.uniform(0.5, 1.5)
        self._away[client] = now + retry_after_s
        return RetryLater(retry_after_s=retry_after_s)

    def _mean_retry_s(self, now: float) -> float:
        """Return the mean pause at which clients return 1.5 times as fast as places become free."""
        capacity = sum(self._capacities.values())
        # The factor 1.5 is a reserve, because too few waiting clients would delay rounds.
        rate = self.rate(now) + sum(rate for _, rate, _ in self._other_replicas.values())
        returns_per_s = 1.5 * max(capacity / _POLL_S, rate)
        pause = (self._num_outside + 1) / returns_per_s if returns_per_s else MAX_RETRY_AFTER_S
        # Early rates are unreliable: the pause is at most the time since the first claim plus 10 s.
        observed_s = now - (now if self._first_claim_at is None else self._first_claim_at) + 10.0
        return max(min(pause, observed_s, MAX_RETRY_AFTER_S / 1.5), _MIN_RETRY_AFTER_S)

    def rate(self, now: float) -> float:
        """Return the rate of finished assignments over about the last 30 s, per second."""
        return self._rate * max(0.0, 1.0 - (now - self._rate_at) / _RATE_WINDOW_S)

    def _expire(self, now: float) -> None:
        """Remove expired entries: clients that disconnected or use another replica."""
        if self._other_replicas:
            self._other_replicas = {
                r: load for r, load in self._other_replicas.items() if load[2] > now
            }
        if now > self._swept_at + 10.0:
            self._swept_at = now
            members = self._members.items()
            self.remove([c for c, waiting in members if waiting.member.until <= now])
            late = MAX_RETRY_AFTER_S / 10
            self._away = {c: back for c, back in self._away.items() if back + late > now}
            self._after_work = {c: until for c, until in self._after_work.items() if until > now}
