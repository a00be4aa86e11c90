"""The state of a run, its encoding for the store, and the result of a handler."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import cache
from typing import Any, Generic, Literal, NamedTuple, TypeVar, get_type_hints

from pydantic import BaseModel, TypeAdapter

from fedone_sdk import messages
from fedone_sdk.aggregator.rounds.by_class import ByClass
from fedone_sdk.algorithms import Memory, State, alpha_sha256, dump_memory, load_memory
from fedone_sdk.budget import NOTHING, Account, Usage
from fedone_sdk.errors import ProblemError

T = TypeVar("T")
R = TypeVar("R")
D = TypeVar("D")

_NOTHING: Any = None

MAX_UNFIT = 1000
"""A state has at most this many unfit clients (`Decline.unfit`), and at most this many clients with
strikes. This limits the size of a commit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """A place for a client in a round; a round of K* clients has K* seats.

    Attributes:
        number: Number of the seat in the round, from 0.
        phase: ``offered``, then ``working`` from the client's claim, then ``done`` at its update.
        due: When the client loses the seat, in seconds since the epoch.
        step: Number of local steps done.
        own_model: Whether the client queries its own model.
        num_samples: Number of prompts of the assignment, I.
        num_steps: Number of local steps of the assignment, E; 1 in the losses exchange.
        reflects: Whether the client may write a candidate, and the lease has a query to score it.
        calls: Ids of the client's gateway requests, whose queries are in `used`.
        sent: Upper bounds on the costs of pending gateway calls, without queries, by reservation.
        used: Number of queries sent to the gateway, and the cost of finished calls.
        queries: Number of queries charged for earlier assignments of the seat.
        local: The client's state of the method; None if it equals the run's state of the method.
        losses: For each local step, the losses of its prompts.
        by_class: For each local step, the losses per class, if the run estimates label biases.
        whole: Whether each mini-batch contains all rows that the client had when it got the seat.
    """

    number: int
    client: int
    phase: Literal["offered", "working", "done"]
    due: float
    step: int = 0
    assignment_id: str | None = None
    own_model: bool = False
    num_samples: int = 0
    num_steps: int = 0
    reflects: bool = False
    calls: frozenset[str] = frozenset()
    sent: Mapping[str, Usage] = field(default_factory=dict)
    used: Usage = NOTHING
    queries: int = 0
    local: State | None = None
    losses: tuple[tuple[float, ...], ...] = ()
    by_class: tuple[ByClass, ...] = ()
    weight: int = 1
    whole: bool = False
    mean_loss: float = 0.0
    renewals: int = 0

    @property
    def key(self) -> tuple[int, int]:
        """Number and client, which identify the seat in its round."""
        return self.number, self.client

    @property
    def num_queries(self) -> int:
        """Number of queries of the prompts, without the query that tries a new candidate."""
        return self.num_samples * self.num_steps

    @property
    def max_pending(self) -> Usage:
        """Upper bound on the cost of pending gateway calls, without queries."""
        return sum(self.sent.values(), NOTHING)

    def settled(self, phase: Literal["offered", "done"], spent: Usage, **changes: Any) -> Seat:
        """Return the seat after the end of its assignment, which has cost `spent`."""
        return replace(
            self,
            phase=phase,
            assignment_id=None,
            queries=self.queries + spent.queries,
            calls=frozenset(),
            sent={},
            used=NOTHING,
            reflects=False,
            **changes,
        )


class Strikes(NamedTuple):
    """Strikes of a client for lost seats; after too many, it gets no work for a while.

    Attributes:
        recent: Strikes since the run's last update. A lost seat gives 1, and 1 per renewal, up to
            `RoundMachine.MAX_STRIKES`. If the client loses several seats, only the seat with the
            most strikes counts, because all seats may be lost for the same reason.
        proven: Earlier strikes, minus the client's updates. Recent strikes become proven at an
            update of another client, which shows that the model is available.
        until: When the client may get a seat again, in seconds since the epoch.
    """

    recent: int = 0
    proven: int = 0
    until: float = 0.0


class Lineage(NamedTuple):
    """The origin of a candidate that was added during the run.

    Attributes:
        client: Enrolment index of the client that wrote the candidate, and must not score it; None
            if the server merged other candidates.
        parents: Indices of the candidates that were improved or merged.
    """

    text: str
    client: int | None
    parents: tuple[int, ...]

    def line(self, round_number: int, slot: str) -> tuple[str, dict[str, Any]]:
        """Return the line of the run's log that records this origin: its kind and body."""
        return "proposal", {"round": round_number, "slot": slot, **self._asdict()}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """The immutable state of a run.

    Attributes:
        reason: Why the run ended or paused, in full, for operators.
        summary: The reason for viewers, without the text of a provider or a device; None if viewers
            get `reason`.
        round: Number of rounds done, which is the index of the current round.
        account: Caps, spending and leases. They include the evaluation, except for its queries.
        evaluation: Spending and leases of the evaluation alone, with its queries.
        drawn_last: Clients that lost a seat in this round; they are drawn only if no others wait.
        lost: Number of assignments lost since the last accepted update.
        last_lost: Why the last assignment was lost: a text for viewers, and one for operators.
        strikes: Strikes of clients, by enrolment index.
        fills: Number of draws of clients in this round; it is part of the next draw's seed.
        rollbacks: Number of rollbacks; it is part of all seeds.
        releases: Number of results with noise that each client may have sent.
        models: Names that the provider has reported for the model, with ``system_fingerprint``.
        verdict: Whether tuning improved the metric; None before the final evaluation.
        proposed: Candidates added since the start, each with its slot.
        waiting: Candidates that will be added at the end of the round, each with its slot.
        lineage: Origins of the candidates that devices wrote or the server merged.
        merged_at: The round of the last merge of candidates.
        judge: The cost of the judge of generated texts.
        planned: Number of queries over which the method spreads its search, if raised caps allow
            more than the spec's budget; otherwise None.
    """

    status: messages.RunStatus = "running"
    reason: str | None = None
    summary: str | None = None
    round: int = 0
    method: State
    account: Account
    evaluation: Account
    seats: tuple[Seat, ...] = ()
    drawn_last: frozenset[int] = frozenset()
    lost: int = 0
    last_lost: tuple[str, str] = ("", "")
    strikes: Mapping[int, Strikes] = field(default_factory=dict)
    fills: int = 0
    rollbacks: int = 0
    quarantined: frozenset[int] = frozenset()
    unfit: Mapping[int, str] = field(default_factory=dict)
    defence: Memory = field(default_factory=dict)
    releases: Mapping[int, int] = field(default_factory=dict)
    paused: bool = False
    model: str | None = None
    models: tuple[str, ...] = ()
    started_at: float | None = None
    ended_at: float | None = None
    metric: messages.MetricReport
    verdict: messages.Verdict | None = None
    proposed: tuple[tuple[str, str], ...] = ()
    waiting: tuple[tuple[str, str], ...] = ()
    lineage: tuple[Lineage, ...] = ()
    merged_at: int = 0
    proposer: messages.ProposerReport | None = None
    judge: Usage | None = None
    planned: int | None = None

    @property
    def added(self) -> tuple[str, ...]:
        """The texts of `proposed` and `waiting`."""
        return tuple(text for _, text in (*self.proposed, *self.waiting))

    @property
    def running(self) -> bool:
        """Whether the run is running."""
        return self.status == "running"

    @property
    def can_resume(self) -> bool:
        """Whether the run can be resumed."""
        return self.status in ("stopped", "failed")

    def seat_of(self, client: int) -> Seat | None:
        """Return the client's seat that is not done, if any."""
        return next((s for s in self.seats if s.client == client and s.phase != "done"), None)

    def seat_with(self, assignment_id: str) -> Seat | None:
        """Return the seat of an open assignment, if any."""
        return next(
            (s for s in self.seats if s.assignment_id == assignment_id and s.phase == "working"),
            None,
        )

    @property
    def timed_seats(self) -> tuple[Seat, ...]:
        """Working seats, and offered seats of clients without a working seat; only these expire."""
        at_work = {seat.client for seat in self.seats if seat.phase == "working"}
        return tuple(
            seat
            for seat in self.seats
            if seat.phase == "working" or (seat.phase == "offered" and seat.client not in at_work)
        )

    @property
    def next_deadline(self) -> float | None:
        """The earliest deadline of a seat, seconds since the epoch."""
        return min((seat.due for seat in self.timed_seats), default=None)

    def is_aside(self, client: int, now: float) -> bool:
        """Whether a client gets no work at present because of its strikes."""
        return client in self.strikes and self.strikes[client].until > now

    def is_used_up(self, seat: Seat) -> bool:
        """Whether all queries of a seat's lease are sent."""
        lease = self.account.leases.get(seat.assignment_id or "", NOTHING)
        return seat.used.queries >= lease.queries

    def is_answered(self, seat: Seat) -> bool:
        """Whether all prompts of a seat are answered, so that only the update is missing."""
        return bool(seat.num_queries) and not seat.sent and seat.used.queries >= seat.num_queries

    def with_seat(self, seat: Seat, **changes: Any) -> RunState:
        """Return the state with a new version of a seat, and with other changes."""
        seats = tuple(seat if s.key == seat.key else s for s in self.seats)
        return replace(self, seats=seats, **changes)

    def without_seat(self, seat: Seat) -> RunState:
        """Return the state without this seat."""
        return replace(self, seats=tuple(s for s in self.seats if s.key != seat.key))

    def without_draw(self, **changes: Any) -> RunState:
        """Return the state without the round's seats, as before a draw, with other changes."""
        return replace(self, seats=(), drawn_last=frozenset(), fills=0, **changes)

    def end(
        self,
        status: messages.RunStatus,
        reason: str | None,
        now: float,
        *,
        summary: str | None = None,
    ) -> RunState:
        """Return the state of the ended run."""
        return replace(
            self, status=status, reason=reason, summary=summary, ended_at=now, paused=False
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """An assignment that has ended. It is stored to answer late and repeated updates.

    Attributes:
        said: The reason in the words of the client or of the operator.
        receipt: Confirmation of the accepted update; None if there was no accepted update.
    """

    assignment_id: str
    client: int
    reason: str
    said: str | None = None
    receipt: messages.Receipt | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRound:
    """A round that has ended.

    Attributes:
        report: The round's report, with an empty `client_id`.
        clients: Enrolment indices, in seat order.
        record: The content of the round's line in the log, without the report.
    """

    report: messages.RoundReport
    clients: tuple[int, ...]
    record: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result(Generic[T]):
    """What a handler returns: the next state, the records to store with it, and the reply.

    Attributes:
        log: Lines of the run's log (kind and body), without the line of a finished round.
        memories: The method's memories to store for clients, by enrolment index.
        refusal: An error that is raised to the caller after the state is stored.
    """

    state: RunState
    closed: tuple[Closed, ...] = ()
    finished: FinishedRound | None = None
    log: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    memories: Mapping[int, Memory] = field(default_factory=dict)
    reply: T = _NOTHING
    refusal: ProblemError | None = None

    def then(self, later: Result[R]) -> Result[R]:
        """Return the result of two handlers, one after the other; the reply is that of `later`."""
        return replace(
            later,
            closed=(*self.closed, *later.closed),
            finished=later.finished or self.finished,
            log=(*self.log, *later.log),
            memories={**self.memories, **later.memories},
        )


def offers(before: RunState, after: RunState) -> tuple[int, ...]:
    """Return clients with a new seat. If budget became free, add clients with an offered seat."""
    was, now = before.account, after.account
    released = len(now.leases) < len(was.leases) or now.cap is not was.cap
    known = {(s.number, s.client, s.step) for s in before.seats if s.phase != "done"}
    return tuple(
        dict.fromkeys(
            seat.client
            for seat in after.seats
            if (released and seat.phase == "offered")
            or (seat.phase != "done" and (seat.number, seat.client, seat.step) not in known)
        )
    )


# Codec: a JSON document and a block of arrays

_METHOD, _DEFENCE = "method", "defence"
_ARRAYS = (_METHOD, _DEFENCE, "local")
"""Fields of a state and of its seats that are stored in the block of arrays."""


def arrays_of(state: RunState) -> dict[str, Any]:
    """Return all arrays of a state by name, without copies, for `dump_memory`."""
    arrays = _named(_METHOD, state.method)
    arrays |= {f"{_DEFENCE}/{key}": value for key, value in state.defence.items()}
    for seat in state.seats:
        if seat.local is not None:
            arrays |= _named(f"seat{seat.number}", seat.local)
    return arrays


def encode_snapshot(state: RunState) -> bytes:
    """Return the method's state as bytes, for a rollback."""
    return dump_memory(_named(_METHOD, state.method))


def decode_snapshot(arrays: bytes) -> State:
    """Return the method's state of a snapshot; a ``ValueError`` if it is damaged."""
    method = _unnamed(_METHOD, load_memory(arrays))
    if method is None:
        raise ValueError("the snapshot has no alpha")
    return method


def snapshot_sha256(arrays: bytes) -> str:
    """Return the ``alpha_sha256`` of a snapshot; a ``ValueError`` if it is damaged."""
    return alpha_sha256(decode_snapshot(arrays).alpha)


def encode_document(state: RunState, **more: object) -> str:
    """Return the state without its arrays as JSON, with the keys and values of `more` added."""
    return json.dumps({**_fields(state), **more}, default=_plain, separators=(",", ":"))


def decode(document: dict[str, Any], arrays: bytes) -> RunState:
    """Return the state of a document and its arrays; a ``ValueError`` if they are damaged."""
    try:
        loaded = load_memory(arrays)
        method = _unnamed(_METHOD, loaded)
        if method is None:
            raise ValueError("the run's alpha is missing")
        seats = tuple(
            _loaded(Seat, seat, local=_unnamed(f"seat{seat['number']}", loaded))
            for seat in document["seats"]
        )
        defence = _below(_DEFENCE, loaded)
        return _loaded(RunState, {**document, "seats": seats}, method=method, defence=defence)
    except (ArithmeticError, AttributeError, KeyError, TypeError) as exc:
        raise ValueError(f"not a run's state: {exc}") from exc


def _fields(record: Any) -> dict[str, Any]:
    # `dataclasses.fields` would take a third of the time of the encoding.
    return {
        name: getattr(record, name) for name in record.__dataclass_fields__ if name not in _ARRAYS
    }


def _plain(value: Any) -> object:
    """Return a value in a form that JSON can represent; amounts of money become exact texts."""
    match value:
        case Usage():
            return value.exact()
        case BaseModel():
            return value.model_dump()
        case frozenset():
            return sorted(value)
        case Decimal():
            return str(value)
    return _fields(value)


def _loaded(record: Callable[..., D], document: dict[str, Any], **arrays: Any) -> D:
    readers = _readers(record)
    if wrong := document.keys() ^ readers.keys():
        raise ValueError(f"not a run's state: missing or unknown keys {sorted(wrong)}")
    values = {name: read(document[name]) for name, read in readers.items()}
    return record(**values, **arrays)


@cache
def _readers(record: Any) -> dict[str, Callable[[Any], Any]]:
    hints = get_type_hints(record)
    return {
        # `decode` has loaded the seats already.
        name: tuple if name == "seats" else TypeAdapter(hint).validate_python
        for name, hint in hints.items()
        if name not in _ARRAYS
    }


def _named(prefix: str, state: State) -> dict[str, Any]:
    memory = {f"{prefix}/memory/{key}": value for key, value in state.memory.items()}
    return {f"{prefix}/alpha": state.alpha, **memory}


def _unnamed(prefix: str, arrays: Memory) -> State | None:
    alpha = arrays.get(f"{prefix}/alpha")
    return None if alpha is None else State(alpha=alpha, memory=_below(f"{prefix}/memory", arrays))


def _below(prefix: str, arrays: Memory) -> dict[str, Any]:
    start = f"{prefix}/"
    return {
        key.removeprefix(start): value for key, value in arrays.items() if key.startswith(start)
    }
