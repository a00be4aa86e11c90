"""The state of a run, as data: what the round machine works on and a store keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from fedone_sdk.aggregator.rounds.curves import Curves
from fedone_sdk.algorithms import Memory, State
from fedone_sdk.budget import NOTHING, Account, Usage
from fedone_sdk.messages import MetricReport, RunStatus, Verdict
from fedone_sdk.task import Bias

__all__ = ["MOST_UNFIT", "RunState", "Seat"]

MOST_UNFIT = 1000
"""Unfit clients that a run remembers: its state is written with every event."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """One of a round's K* places, from being offered to a client until its work is done.

    Attributes:
        slot: Which of the K* places.
        client: Enrolment index of the client.
        phase: ``offered`` waits for the client to come, ``working`` for its update.
        due: When the client loses the seat, seconds since the epoch.
        step: Local steps done (losses exchange; alpha's are done on the device).
        assignment_id: Names the work once it is given out.
        own_model: Whether the client asks a model of its own for it.
        num_samples: I of the work given out.
        num_steps: E of the work given out.
        calls: Gateway requests whose queries were counted.
        sent: Worst case of the gateway calls that are under way, by attempt, without queries.
        used: Queries asked of the gateway, and what finished calls spent.
        queries: Queries settled in this seat's earlier steps.
        local: The client's method state; None while it is still the round's.
        losses: Losses that came back, step by step (the log and the mean).
        curves: The same by class and label bias, where the run calibrates by labels.
        weight: Examples that the client holds.
        mean_loss: Over the seat's scored prompts.
        renewals: How often the work's deadline was put off.
    """

    slot: int
    client: int
    phase: Literal["offered", "working", "done"]
    due: float
    step: int = 0
    assignment_id: str | None = None
    own_model: bool = False
    num_samples: int = 0
    num_steps: int = 0
    calls: frozenset[str] = frozenset()
    sent: Mapping[str, Usage] = field(default_factory=dict)
    used: Usage = NOTHING
    queries: int = 0
    local: State | None = None
    losses: tuple[tuple[float, ...], ...] = ()
    curves: tuple[Curves, ...] = ()
    weight: int = 1
    mean_loss: float = 0.0
    renewals: int = 0

    @property
    def max_pending(self) -> Usage:
        """The most that gateway calls under way may spend, without queries."""
        return sum(self.sent.values(), NOTHING)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Where a run stands. Frozen: an event gives a new one.

    Attributes:
        status: Whether it runs or how it ended.
        reason: Why it ended, where the status does not say; of a pause, for those who can end it.
        summary: Why it is paused, for those who look on; None is the same as `reason`.
        round: Rounds done; the number of the current round.
        method: Alpha and what the method keeps on the server.
        server_memory: What the server optimiser remembers.
        account: Caps, spending and leases of training and (queries aside) evaluation.
        evaluation: Evaluation's own count.
        seats: The current round's seats.
        passed: Clients that lost or declined a seat in this round.
        lost: Assignments that came to nothing since the last accepted update.
        fills: How often clients of this round were drawn; part of the draw's seed.
        rollbacks: How often the run was set back; part of the seeds of what it draws.
        quarantined: Clients that get no work.
        unfit: Clients that fit no work of this run, by enrolment index, with the reason; the
            newest `MOST_UNFIT`.
        defence: What the defences remember of the clients' updates.
        releases: How often each client was asked for noised numbers, by enrolment index.
        paused: Whether a stopped run waits for somebody to change something, its work kept.
        model: Fingerprint of the model that scores.
        votes: Which model each device has named, by enrolment index, until the run's is settled.
        models: What the provider called the models that answered; a new one pauses the run.
        started_at: First assignment, seconds since the epoch.
        ended_at: End, seconds since the epoch.
        metric: The dev metric as far as it was measured.
        bias: The label bias that the measurement of the final prompt found without labels.
        verdict: Whether tuning was worth it, once the final prompt was measured.
        proposed: Candidates that were added since the run began, each with its slot.
        waiting: Those that come in when the round ends.
        planned: The queries that the method plans with since caps were raised; None are those of
            the run's description.
    """

    status: RunStatus = "running"
    reason: str | None = None
    summary: str | None = None
    round: int = 0
    method: State
    server_memory: Memory = field(default_factory=dict)
    account: Account
    evaluation: Account
    seats: tuple[Seat, ...] = ()
    passed: frozenset[int] = frozenset()
    lost: int = 0
    fills: int = 0
    rollbacks: int = 0
    quarantined: frozenset[int] = frozenset()
    unfit: Mapping[int, str] = field(default_factory=dict)
    defence: Memory = field(default_factory=dict)
    releases: Mapping[int, int] = field(default_factory=dict)
    paused: bool = False
    model: str | None = None
    votes: Mapping[int, str] = field(default_factory=dict)
    models: tuple[str, ...] = ()
    started_at: float | None = None
    ended_at: float | None = None
    metric: MetricReport
    bias: Bias | None = None
    verdict: Verdict | None = None
    proposed: tuple[tuple[str, str], ...] = ()
    waiting: tuple[tuple[str, str], ...] = ()
    planned: int | None = None

    @property
    def running(self) -> bool:
        """Whether the run still takes part in rounds."""
        return self.status == "running"

    def seat_of(self, client: int) -> Seat | None:
        """The seat that waits for this client, if any."""
        return next((s for s in self.seats if s.client == client and s.phase != "done"), None)

    def seat_with(self, assignment_id: str) -> Seat | None:
        """The seat whose work has this id, while it is under way."""
        return next(
            (s for s in self.seats if s.assignment_id == assignment_id and s.phase == "working"),
            None,
        )

    def is_answered(self, seat: Seat) -> bool:
        """Whether a seat's client has had all answers that it may ask for, and owes its update."""
        lease = self.account.leases.get(seat.assignment_id or "", NOTHING)
        return bool(lease.queries) and not seat.sent and seat.used.queries == lease.queries
