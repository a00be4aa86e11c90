"""Inputs (events) and outputs (effects) of the round machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from fedone_sdk.algorithms import Memory, State
from fedone_sdk.budget import NOTHING, Budget, Usage
from fedone_sdk.errors import BackendError, SpecError, one_line
from fedone_sdk.messages import (
    AlphaAssignment,
    AlphaUpdate,
    LossesAssignment,
    LossesUpdate,
    Receipt,
    RoundReport,
    RunStatus,
    Verdict,
)

# Events


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatsVacant:
    """Seats are vacant.

    Attributes:
        available: Clients that may be drawn: enrolment index -> number of examples.
        enrolled: Number of enrolled clients, connected or not; None is unknown.
    """

    available: Mapping[int, int]
    enrolled: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkRequested:
    """A client with a seat claims its work.

    Attributes:
        client: Its enrolment index.
        assignment_id: A fresh id for a new assignment.
        own_model: Whether the client queries its own model.
        memory: Method memory after the client's last work (losses exchange).
    """

    client: int
    assignment_id: str
    own_model: bool = False
    memory: Memory = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateArrived:
    """A client sends an update.

    Attributes:
        assignment_id: Its assignment.
        update: The message.
        body_sha256: Digest of the request body.
    """

    assignment_id: str
    update: AlphaUpdate | LossesUpdate
    body_sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkDeclined:
    """A client declines its assignment.

    Attributes:
        assignment_id: The assignment.
        reason: The client's reason.
        usage: Usage that the client reports.
        unfit: Whether the client is unfit for all work of this run.
    """

    assignment_id: str
    reason: str
    usage: Usage = NOTHING
    unfit: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfitCleared:
    """An unfit client has changed and may be drawn again."""

    client: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewalRequested:
    """A client asks for a full new deadline."""

    assignment_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallReserved:
    """The gateway is about to query the model for a client.

    Attributes:
        assignment_id: The assignment whose lease pays.
        call: Id of the client's request. Repeated requests count their queries once.
        attempt: Id of this attempt, with the id of its replica.
        worst: Upper bound on the cost, on top of earlier reservations of the attempt.
    """

    assignment_id: str
    call: str
    attempt: str
    worst: Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSettled:
    """An attempt has ended; `used` is its cost without queries, which were counted before."""

    assignment_id: str
    attempt: str
    used: Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSeen:
    """The provider reports the model that answered."""

    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseRequested:
    """The run pauses until an operator resumes it. Open work is kept.

    Attributes:
        reason: The full cause, for operators.
        summary: The cause without the provider's text, for viewers; None equals `reason`.
    """

    reason: str
    summary: str | None = None

    @classmethod
    def because(cls, failure: Exception) -> Self:
        """Return the pause that a failure causes."""
        if isinstance(failure, SpecError):
            return cls(reason=one_line("; ".join(failure.problems)))
        summary = failure.summary if isinstance(failure, BackendError) else str(failure)
        return cls(reason=one_line(str(failure)), summary=one_line(summary))


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationReserved:
    """Evaluation is about to query the model; an open lease grows."""

    lease_id: str
    worst: Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSettled:
    """Evaluation has its answers."""

    lease_id: str
    used: Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The dev metric of a prompt was measured.

    Attributes:
        which: The prompt.
        value: The metric.
        at: For ``after``: round and number of rollbacks when the prompt was current.
        verdict: For ``after``: whether tuning improved the metric.
    """

    which: Literal["no_prompt", "before", "after"]
    value: float
    at: tuple[int, int] | None = None
    verdict: Verdict | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicasLost:
    """Replicas have exited: their pending calls are charged in full.

    Attributes:
        alive: The replicas that still run.
        down: Whether no replica served the run for a while: deadlines start again.
    """

    alive: frozenset[str]
    down: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePassed:
    """Deadlines may have passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested:
    """Stop the run.

    Attributes:
        status: The run's final status.
        reason: The reason, in words.
        keep: Keeps the round's open work for a resume, which then draws the same prompts. False
            ends the round with the updates so far.
    """

    status: Literal["stopped", "failed"] = "stopped"
    reason: str | None = None
    keep: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidatesProposed:
    """New candidates for a slot, which join at the end of the current round.

    Attributes:
        slot: The slot's name.
        texts: The candidates.
    """

    slot: str
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantineRequested:
    """Put a client in quarantine: it gets no more work."""

    client: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantineLifted:
    """Release a client from quarantine."""

    client: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackRequested:
    """Roll the run back to its state after an earlier round.

    Attributes:
        method: Method state of that round: alpha and its memory.
        to_round: Number of rounds done at that point.
        reason: The reason, for the log.
    """

    method: State
    to_round: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeRequested:
    """Resume a stopped, paused or failed run, with the current model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RaiseRequested:
    """Raise caps; a run that they ended runs again.

    Attributes:
        caps: The new caps; None keeps a cap.
    """

    caps: Budget


Event = (
    SeatsVacant
    | WorkRequested
    | UpdateArrived
    | WorkDeclined
    | UnfitCleared
    | RenewalRequested
    | CallReserved
    | CallSettled
    | ModelSeen
    | PauseRequested
    | EvaluationReserved
    | EvaluationSettled
    | CandidatesProposed
    | Measured
    | QuarantineRequested
    | QuarantineLifted
    | ReplicasLost
    | RollbackRequested
    | TimePassed
    | StopRequested
    | ResumeRequested
    | RaiseRequested
)


# Effects


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatOffered:
    """Wake this client's poll: it has a seat."""

    client: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Assigned:
    """Send this assignment to the client."""

    assignment: AlphaAssignment | LossesAssignment


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlineExtended:
    """Send the client its new deadline, seconds from now."""

    deadline_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """Answer the client's update, and every repetition of it, with this receipt."""

    client: int
    receipt: Receipt


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Answer with this problem."""

    code: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkClosed:
    """Record that an assignment ended without an update, to answer a late one."""

    assignment_id: str
    client: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySaved:
    """Store this client's method memory until its next work."""

    client: int
    memory: Memory


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundFinished:
    """A round has ended.

    Attributes:
        report: The round's report, with an empty `client_id`.
        clients: Enrolment indices, in seat order.
        record: The log record.
    """

    report: RoundReport
    clients: tuple[int, ...]
    record: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientQuarantined:
    """The defences put a client in quarantine.

    Attributes:
        client: Its enrolment index.
        round: The round at whose end it happened.
        reason: The cause.
    """

    client: int
    round: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRolledBack:
    """The run was rolled back.

    Attributes:
        to_round: Number of rounds that remain.
        record: The log record.
    """

    to_round: int
    record: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class CapsRaised:
    """The caps were raised.

    Attributes:
        record: The log record.
    """

    record: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricMeasured:
    """The deployable prompt of a round was measured.

    Attributes:
        round: The round.
        value: The dev metric.
    """

    round: int
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded:
    """The run has ended."""

    status: RunStatus


Effect = (
    SeatOffered
    | Assigned
    | DeadlineExtended
    | Accepted
    | Refused
    | WorkClosed
    | MemorySaved
    | RoundFinished
    | ClientQuarantined
    | RunRolledBack
    | CapsRaised
    | MetricMeasured
    | RunEnded
)
