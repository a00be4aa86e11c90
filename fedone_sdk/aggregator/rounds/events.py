"""What can happen to a run, and what follows from it: inputs and outputs of the round machine."""

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
from fedone_sdk.task import Bias

__all__ = [
    "Accepted",
    "Assigned",
    "CandidatesProposed",
    "CapsRaised",
    "WorkClosed",
    "WorkDeclined",
    "Effect",
    "EvaluationReserved",
    "EvaluationSettled",
    "Event",
    "CallSettled",
    "CallReserved",
    "Measured",
    "MemorySaved",
    "MetricMeasured",
    "ModelSeen",
    "PauseRequested",
    "DeadlineExtended",
    "ClientQuarantined",
    "QuarantineRequested",
    "RaiseRequested",
    "UnfitCleared",
    "Refused",
    "QuarantineLifted",
    "RenewalRequested",
    "ReplicasLost",
    "ResumeRequested",
    "RollbackRequested",
    "RoundFinished",
    "RunEnded",
    "SeatOffered",
    "SeatsVacant",
    "StopRequested",
    "TimePassed",
    "UpdateArrived",
    "RunRolledBack",
    "WorkRequested",
]


# Events


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatsVacant:
    """Seats are free, and these clients could take them.

    Attributes:
        available: Enrolment index -> examples held, of the clients seen lately.
        enrolled: How many clients there are, seen lately or not; None is not known.
    """

    available: Mapping[int, int]
    enrolled: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkRequested:
    """A client that has a seat came for its work.

    Attributes:
        client: Its enrolment index.
        assignment_id: A fresh id, should new work be given out.
        own_model: Whether it asks a model of its own.
        model: Fingerprint of that model, as far as the client knows it before it works.
        memory: What its method remembered after its last work (losses exchange).
    """

    client: int
    assignment_id: str
    own_model: bool = False
    model: str | None = None
    memory: Memory = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateArrived:
    """A client returned its work.

    Attributes:
        assignment_id: Which work.
        update: The message.
        body_sha256: Digest of the body it came in.
    """

    assignment_id: str
    update: AlphaUpdate | LossesUpdate
    body_sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkDeclined:
    """A client gave its work back.

    Attributes:
        assignment_id: Which work.
        reason: Why.
        usage: What it says it spent.
        unfit: Whether it fits no work of this run.
    """

    assignment_id: str
    reason: str
    usage: Usage = NOTHING
    unfit: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfitCleared:
    """A client that did not fit has changed: it may be offered work again."""

    client: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewalRequested:
    """A client is still at work and asks for another full deadline."""

    assignment_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallReserved:
    """The gateway is about to ask the model for a client.

    Attributes:
        assignment_id: Whose lease pays.
        call: Names the client's request. Its queries count once, however often it is repeated.
        attempt: Names this attempt at it, and the replica that makes it.
        worst: The most that asking may spend now, beside what the attempt set aside before.
    """

    assignment_id: str
    call: str
    attempt: str
    worst: Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSettled:
    """The model answered an attempt, or failed; `used` is what it really spent.

    Without queries, which were counted when they were asked.
    """

    assignment_id: str
    attempt: str
    used: Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSeen:
    """The provider said which model answered."""

    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PauseRequested:
    """The run pauses until a person resumes it. Work under way is kept.

    Attributes:
        reason: The cause in full, for operators.
        summary: The cause without the words of the provider, for viewers; None is the same.
    """

    reason: str
    summary: str | None = None

    @classmethod
    def because(cls, failure: Exception) -> Self:
        """The pause that a failure makes necessary."""
        if isinstance(failure, SpecError):
            return cls(reason=one_line("; ".join(failure.problems)))
        summary = failure.summary if isinstance(failure, BackendError) else str(failure)
        return cls(reason=one_line(str(failure)), summary=one_line(summary))


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationReserved:
    """Evaluation is about to ask the model; a lease that is open already grows."""

    lease_id: str
    worst: Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSettled:
    """Evaluation got its answers."""

    lease_id: str
    used: Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The dev metric of a prompt is known.

    Attributes:
        which: Of which prompt.
        value: The metric.
        at: Of ``after``: round and number of rollbacks of the run whose prompt it is.
        bias: The label bias that the measurement found without labels and that another one of the
            prompt would find, too.
        verdict: Of ``after``: whether tuning was worth it.
    """

    which: Literal["no_prompt", "before", "after"]
    value: float
    at: tuple[int, int] | None = None
    bias: Bias | None = None
    verdict: Verdict | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicasLost:
    """Replicas are gone: what they had under way may have been sent, and is charged in full.

    Attributes:
        alive: The replicas that are not gone.
        down: Whether nobody served the run for a while: its deadlines begin anew.
    """

    alive: frozenset[str]
    down: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePassed:
    """Deadlines may be over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested:
    """The run is to end now.

    Attributes:
        status: How it ends.
        reason: Why, for people.
        keep: Keeps the open work of the round for a resume, which then changes nothing in what
            is drawn. Otherwise the round ends with what it has.
    """

    status: Literal["stopped", "failed"] = "stopped"
    reason: str | None = None
    keep: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CandidatesProposed:
    """New candidates for a slot; they come in when the round under way ends.

    Attributes:
        slot: The slot's name.
        texts: The candidates.
    """

    slot: str
    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantineRequested:
    """A client is not to be trusted: it gets no more work."""

    client: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantineLifted:
    """A client may take part again."""

    client: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RollbackRequested:
    """The run is to be set back to where it stood before a round.

    Attributes:
        method: Alpha and what the method kept then.
        server_memory: What the server optimiser remembered then.
        memories: What clients' methods remembered then, by enrolment index.
        to_round: Rounds done then.
        reason: Why, for the log.
        rollbacks: How often the run had been set back when this was looked up. In a run that was
            set back since then, that round may be another one. None is not looked at.
    """

    method: State
    server_memory: Memory = field(default_factory=dict)
    memories: Mapping[int, Memory] = field(default_factory=dict)
    to_round: int
    reason: str
    rollbacks: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeRequested:
    """A stopped, paused or failed run is to go on, with the model that there is now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RaiseRequested:
    """Caps are to be raised; a run that they have ended is to go on.

    Attributes:
        caps: The new caps; those that are None stay as they are.
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
    """Wake this client if it waits: it has a seat."""

    client: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Assigned:
    """Send this work to the client that asked."""

    assignment: AlphaAssignment | LossesAssignment


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlineExtended:
    """Tell the client that it has so many seconds for its work from now."""

    deadline_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """Answer the client's update with this receipt, now and whenever the update is repeated."""

    client: int
    receipt: Receipt


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Answer with this problem."""

    code: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkClosed:
    """Work ended without an accepted update; remember it, so that a late update is told."""

    assignment_id: str
    client: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySaved:
    """Keep what this client's method remembers until its next work."""

    client: int
    memory: Memory


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundFinished:
    """A round is over.

    Attributes:
        report: For people; `client_id` still holds enrolment indices.
        clients: Enrolment indices, in seat order.
        record: For the log: what is needed to compute the round again.
    """

    report: RoundReport
    clients: tuple[int, ...]
    record: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientQuarantined:
    """The defences have put a client in quarantine.

    Attributes:
        client: Its enrolment index.
        round: At the end of which round.
        reason: What it did.
    """

    client: int
    round: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRolledBack:
    """The run stands again where it stood after `to_round` rounds.

    Attributes:
        to_round: Rounds that still count.
        record: For the log.
    """

    to_round: int
    record: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class CapsRaised:
    """The run has higher caps.

    Attributes:
        record: For the log.
    """

    record: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricMeasured:
    """The deployable prompt after a round has been measured.

    Attributes:
        round: Which round.
        value: The dev metric.
    """

    round: int
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded:
    """The run is over."""

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
