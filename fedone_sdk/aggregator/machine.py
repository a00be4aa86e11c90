"""The round machine: every decision about a run, with no I/O.

``step(state, event, now) -> (state, effects)`` is a pure function of its arguments: a service
stores the new state and performs the effects in one go; a simulator and a replay drive the very
same code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import singledispatchmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedone_sdk.aggregator.events import (
    Accepted,
    Assigned,
    Closed,
    Declined,
    Effect,
    EvaluationReserved,
    EvaluationSettled,
    Event,
    GatewayAnswered,
    GatewayAsked,
    Measured,
    MemorySaved,
    ModelSeen,
    PauseAsked,
    Refused,
    Renewed,
    Restarted,
    ResumeAsked,
    RoundFinished,
    RunEnded,
    SeatOffered,
    SeatsVacant,
    StopAsked,
    TimePassed,
    UpdateArrived,
    WorkAsked,
)
from fedone_sdk.aggregator.state import RunState, Seat
from fedone_sdk.algorithms import (
    Candidates,
    Memory,
    ServerOptimizer,
    State,
    aggregate,
    alpha_sha256,
    method_from_spec,
    select,
    stream,
    stream_seed,
)
from fedone_sdk.budget import Account, Budget, Usage
from fedone_sdk.errors import BudgetExhausted, ProblemError, UnknownLease
from fedone_sdk.messages import (
    MAX_ELEMENTS,
    MIN_SCORED_SHARE,
    AlphaAssignment,
    AlphaUpdate,
    Array,
    LossesAssignment,
    LossesUpdate,
    MetricReport,
    Receipt,
    RoundReport,
    RunStatus,
    Step,
)
from fedone_sdk.messages.ndarray import from_wire, memory_from_wire, memory_to_wire, to_wire
from fedone_sdk.spec import RunSpec

__all__ = ["MIN_SAMPLES", "ONE_QUERY", "RoundMachine"]

MIN_SAMPLES = 2
"""The variance-reduced estimator divides by I - 1."""

ONE_QUERY = Usage(queries=1)
"""The most that one query may spend where nothing but queries can be bounded."""


Outcome = tuple[RunState, tuple[Effect, ...]]


class RoundMachine:
    """Decides what happens in one run.

    Args:
        run_id: Names the run in its messages.
        spec: The run.
        vocab_size: N.
        blank: Index of the blank candidate, if there is one.
        worst_query: The most that one query may spend.
        gateway_model: Fingerprint of the gateway's model, empty while that is not known; None when
            clients score themselves.
    """

    def __init__(
        self,
        run_id: str,
        spec: RunSpec,
        *,
        vocab_size: int,
        blank: int | None = None,
        worst_query: Usage = ONE_QUERY,
        gateway_model: str | None = None,
    ) -> None:
        self.run_id = run_id
        self.spec = spec
        self.vocab_size = vocab_size
        self.worst_query = worst_query
        self.gateway_model = gateway_model
        sizes = {
            "alpha": spec.prompt.length * vocab_size,
            "an answer of the gateway": spec.method.num_samples
            * spec.method.batch_size
            * max(len(spec.task.labels), 1),
        }
        for what, size in sizes.items():
            if size > MAX_ELEMENTS:
                raise ValueError(f"{what} would hold {size} numbers, a message {MAX_ELEMENTS}")
        self.algorithm = method_from_spec(
            spec.method,
            prompt_len=spec.prompt.length,
            vocab_size=vocab_size,
            blank=blank,
            seed=spec.seed,
        )
        self._shape = (spec.prompt.length, vocab_size)
        self._losses_exchange = spec.participation.exchange == "losses"
        self._server_optimizer = ServerOptimizer(
            name=spec.participation.server_optimizer,
            learning_rate=spec.participation.server_learning_rate,
        )

    @property
    def remembers_clients(self) -> bool:
        """Whether clients' method memory is kept here between their rounds."""
        return self._losses_exchange and getattr(self.spec.method, "optimizer", "") == "adamw"

    def start(self) -> RunState:
        """The state of a run that has not begun."""
        evaluation_cap = self.spec.evaluation.queries
        return RunState(
            method=self.algorithm.init(),
            account=Account(cap=self.spec.budget),
            evaluation=Account(
                cap=None if evaluation_cap is None else Budget(queries=evaluation_cap)
            ),
            model=self.gateway_model or None,
            metric=MetricReport(name=self.spec.task.metric),
        )

    def vacancies(self, state: RunState) -> int:
        """How many of the round's seats nobody has."""
        if not state.running:
            return 0
        return self.spec.participation.clients_per_round - len(state.seats)

    def wants_seating(self, state: RunState) -> bool:
        """Whether a `SeatsVacant` event could change something."""
        return state.running and (bool(self.vacancies(state)) or self._starved(state))

    def can_resume(self, state: RunState) -> bool:
        """Whether a run was broken off, so that it can go on."""
        return state.status in ("stopped", "failed")

    def _starved(self, state: RunState) -> bool:
        """Whether no more work can be paid for, and no open lease could change that."""
        return not state.account.leases and not self._affordable_work(state)[0]

    def next_deadline(self, state: RunState) -> float | None:
        """When the next seat runs out, seconds since the epoch."""
        return min((s.due for s in state.seats if s.phase != "done"), default=None)

    def step(self, state: RunState, event: Event, now: float) -> Outcome:
        """Applies one event.

        Returns:
            The next state, and what is to be done about it; a refusal leaves the state as it was.
        """
        try:
            after, effects = self._apply(event, state, now)
        except ProblemError as refusal:
            return state, (Refused(code=refusal.code, detail=refusal.detail),)
        if len(after.account.leases) < len(state.account.leases):
            # What a lease gave back may pay for a seat that waits for it.
            offers = [SeatOffered(client=s.client) for s in after.seats if s.phase == "offered"]
            effects += tuple(offer for offer in offers if offer not in effects)
        return after, effects

    @singledispatchmethod
    def _apply(self, event: Event, state: RunState, now: float) -> Outcome:
        raise TypeError(f"no rule for {type(event).__name__}")

    # Seats

    @_apply.register
    def _(self, event: SeatsVacant, state: RunState, now: float) -> Outcome:
        if not state.running:
            return state, ()
        if self._starved(state):
            return self._wind_up(state, "budget_exhausted", None, now)
        vacant = self.vacancies(state)
        available = dict(event.available)
        waiting_to_start = state.round == 0 and not state.fills
        if not vacant or (waiting_to_start and len(available) < self._min_clients):
            return state, ()
        uniform = self.spec.participation.selection == "uniform"
        if uniform:
            for seat in state.seats:
                available.pop(seat.client, None)
        # Who gave a seat up is asked again only when nobody else is left.
        fresh = {client: held for client, held in available.items() if client not in state.passed}
        pool = fresh or available
        count = min(vacant, len(pool)) if uniform else vacant
        if not count or not pool:
            return state, ()
        seed = stream_seed(self.spec.seed, "selection", state.round, step=state.fills)
        chosen = select(pool, count, rng=stream(seed), kind=self.spec.participation.selection)
        taken = {seat.slot for seat in state.seats}
        slots = [slot for slot in range(len(taken) + vacant) if slot not in taken]
        due = now + self.spec.participation.claim_timeout_s
        seats = tuple(
            Seat(slot=slot, client=client, phase="offered", due=due, weight=available[client])
            for slot, client in zip(slots, chosen, strict=False)
        )
        state = replace(state, seats=state.seats + seats, fills=state.fills + 1)
        return state, tuple(SeatOffered(client=seat.client) for seat in seats)

    @property
    def _min_clients(self) -> int:
        wanted = self.spec.participation.min_clients
        if wanted is not None:
            return wanted
        if self.spec.data is not None:
            return self.spec.data.num_clients
        uniform = self.spec.participation.selection == "uniform"
        return self.spec.participation.clients_per_round if uniform else 1

    @_apply.register
    def _(self, event: TimePassed, state: RunState, now: float) -> Outcome:
        effects: list[Effect] = []
        for seat in state.seats:
            if seat.phase != "done" and seat.due <= now and state.running:
                state, more = self._lose(state, seat, "the deadline passed", None, now)
                effects.extend(more)
        return state, tuple(effects)

    def _lose(
        self, state: RunState, seat: Seat, reason: str, reported: Usage | None, now: float
    ) -> Outcome:
        """Takes a seat from its client; what the client may have spent is spent."""
        was_working = seat.phase == "working"
        state, seat, effects = self._release(state, seat, reason, reported)
        state = replace(state, lost=state.lost + was_working, passed=state.passed | {seat.client})
        more: tuple[Effect, ...] = ()
        if state.lost > self.spec.participation.max_lost:
            state, more = self._wind_up(state, "failed", f"last: {reason}", now)
        elif seat.step:
            # Earlier local steps were paid for: the seat closes with what they gave.
            state, more = self._close(state, replace(seat, phase="done"), now)
        else:
            state = _without(state, seat)
        return state, effects + more

    def _release(
        self, state: RunState, seat: Seat, reason: str, reported: Usage | None
    ) -> tuple[RunState, Seat, tuple[Effect, ...]]:
        """Ends the work of a seat without an update, if it has any, and settles its lease."""
        if seat.phase != "working" or seat.assignment_id is None:
            return state, seat, ()
        closed = Closed(assignment_id=seat.assignment_id, client=seat.client, reason=reason)
        used = self._used(state, seat, reported)
        state = replace(state, account=state.account.settle(seat.assignment_id, used))
        seat = replace(
            seat,
            phase="offered",
            assignment_id=None,
            queries=seat.queries + used.queries,
            calls=frozenset(),
            sent=Usage(),
            used=Usage(),
        )
        return _with(state, seat), seat, (closed,)

    def _used(self, state: RunState, seat: Seat, reported: Usage | None) -> Usage:
        """What a seat's open lease cost.

        Through the gateway the server saw it; what is under way counts in full. A client with a
        model of its own is believed only where the run trusts its clients.
        """
        lease = state.account.leases[seat.assignment_id or ""]
        if self.gateway_model is not None:
            return seat.used + seat.sent
        if self.spec.participation.trusted_clients and reported is not None:
            queries = min(reported.queries, lease.queries)
            return reported.model_copy(update={"queries": queries})
        return lease

    # Work

    @_apply.register
    def _(self, event: WorkAsked, state: RunState, now: float) -> Outcome:
        seat = state.seat_of(event.client)
        if seat is None or not state.running:
            return state, ()
        if seat.phase == "offered":
            samples, steps = self._affordable_work(state)
            if not samples:
                # Somebody else's lease may give something back; the seat waits for that.
                return state, ()
            worst = self.worst_query * (samples * steps)
            seat = replace(
                seat,
                phase="working",
                due=now + self.spec.participation.deadline_s,
                assignment_id=event.assignment_id,
                num_samples=samples,
                num_steps=steps,
                local=seat.local
                or (replace(state.method, memory=event.memory) if event.memory else None),
            )
            state = replace(
                _with(state, seat),
                account=state.account.reserve(event.assignment_id, worst),
                started_at=now if state.started_at is None else state.started_at,
            )
        # A client that asks again lost the answer: it gets the same work, no second lease.
        return state, (Assigned(assignment=self._assignment(state, seat, now)),)

    def _affordable_work(self, state: RunState) -> tuple[int, int]:
        """The prompts and local steps that fit under the caps; fewer near the end."""
        most = self.spec.method.num_samples
        steps = 1 if self._losses_exchange else self.spec.method.local_steps
        for count in range(steps, 0, -1):
            samples = state.account.affordable(self.worst_query * count, most)
            if samples >= MIN_SAMPLES:
                return samples, count
        return 0, 0

    def _seed(self, state: RunState, seat: Seat, purpose: str, step: int) -> int:
        # With replacement a client may hold two seats of a round: the slot keeps them apart.
        position = seat.slot * self.spec.method.local_steps + step
        return stream_seed(self.spec.seed, purpose, state.round, seat.client, position)

    def _assignment(
        self, state: RunState, seat: Seat, now: float
    ) -> AlphaAssignment | LossesAssignment:
        common: dict[str, Any] = {
            "assignment_id": seat.assignment_id,
            "run_id": self.run_id,
            "round": state.round,
            "deadline_s": round(max(seat.due - now, 0.001), 3),
            "leased_queries": seat.num_samples * seat.num_steps,
        }
        if self._losses_exchange:
            indices = self.candidates(state, seat).indices
            return LossesAssignment(
                **common,
                prompts=Array.of_indices(indices.ravel().tolist(), indices.shape, self.vocab_size),
                minibatch_seed=self._seed(state, seat, "minibatch", seat.step),
            )
        return AlphaAssignment(
            **common,
            alpha=to_wire(state.method.alpha),
            memory=memory_to_wire(state.method.memory),
            steps=tuple(
                Step(
                    num_samples=seat.num_samples,
                    minibatch_seed=self._seed(state, seat, "minibatch", step),
                    prompt_seed=self._seed(state, seat, "prompts", step),
                )
                for step in range(seat.num_steps)
            ),
        )

    def candidates(self, state: RunState, seat: Seat) -> Candidates:
        """The prompts of a seat's current step; drawn anew from the seed, never stored."""
        rng = stream(self._seed(state, seat, "prompts", seat.step))
        return self.algorithm.ask(seat.local or state.method, rng, seat.num_samples)

    @_apply.register
    def _(self, event: Renewed, state: RunState, now: float) -> Outcome:
        seat = self._working(state, event.assignment_id)
        seat = replace(seat, due=now + self.spec.participation.deadline_s)
        return _with(state, seat), (Assigned(assignment=self._assignment(state, seat, now)),)

    @_apply.register
    def _(self, event: Declined, state: RunState, now: float) -> Outcome:
        seat = self._working(state, event.assignment_id)
        if state.paused:
            raise ProblemError("run_conflict", f"the run is {state.reason}; the work is kept")
        reason = f"the client declined: {event.reason}"
        return self._lose(state, seat, reason, event.usage, now)

    @staticmethod
    def _working(state: RunState, assignment_id: str) -> Seat:
        seat = state.seat_with(assignment_id)
        if seat is None:
            raise ProblemError("assignment_expired", f"assignment {assignment_id} has ended")
        return seat

    # Updates

    @_apply.register
    def _(self, event: UpdateArrived, state: RunState, now: float) -> Outcome:
        seat = self._working(state, event.assignment_id)
        update = event.update
        if state.model is not None and update.model != state.model:
            detail = f"the run scores with {state.model!r}, the update with {update.model!r}"
            state, effects = self._lose(state, seat, detail, update.usage, now)
            return state, (*effects, Refused(code="model_mismatch", detail=detail))
        self._check_scored(update)
        local, losses, mean_loss = self._learn(state, seat, update)
        used = self._used(state, seat, update.usage)
        lease = state.account.leases[event.assignment_id]
        if self.gateway_model is not None and used.queries < lease.queries:
            # Scored where the server does not see it: by a model on the device.
            used = lease
        state = replace(
            state,
            account=state.account.settle(event.assignment_id, used),
            model=update.model,
            lost=0,
        )
        receipt = Receipt(
            assignment_id=event.assignment_id, round=state.round, body_sha256=event.body_sha256
        )
        accepted = Accepted(client=seat.client, receipt=receipt)
        steps_done = seat.step + seat.num_steps
        seat = replace(
            seat,
            phase="done",
            assignment_id=None,
            step=steps_done,
            local=local,
            losses=(*seat.losses, losses) if losses else seat.losses,
            queries=seat.queries + used.queries,
            weight=update.num_examples,
            mean_loss=seat.mean_loss + (mean_loss - seat.mean_loss) * seat.num_steps / steps_done,
            calls=frozenset(),
            sent=Usage(),
            used=Usage(),
        )
        if self._losses_exchange and steps_done < self.spec.method.local_steps:
            # The next local step is another exchange with the same client.
            due = now + self.spec.participation.claim_timeout_s
            state = _with(state, replace(seat, phase="offered", due=due))
            return state, (accepted, SeatOffered(client=seat.client))
        state, effects = self._close(state, seat, now)
        return state, (accepted, *effects)

    @staticmethod
    def _check_scored(update: AlphaUpdate | LossesUpdate) -> None:
        counts = update.scored
        total = counts.scored + counts.failed + counts.vetoed
        if not total or counts.scored < MIN_SCORED_SHARE * total:
            raise ProblemError(
                "invalid_message",
                f"scored: only {counts.scored} of {total} examples were scored; under "
                f"{MIN_SCORED_SHARE:.0%} the assignment must be declined",
            )

    def _learn(
        self, state: RunState, seat: Seat, update: AlphaUpdate | LossesUpdate
    ) -> tuple[State, tuple[float, ...], float]:
        """The client's method state after its work, its losses and their mean."""
        if isinstance(update, LossesUpdate) and self._losses_exchange:
            if len(update.losses) != seat.num_samples:
                raise ProblemError(
                    "invalid_message",
                    f"losses: {len(update.losses)} were sent for {seat.num_samples} prompts",
                )
            base = seat.local or state.method
            local = self.algorithm.tell(base, self.candidates(state, seat), update.losses)
            return local, update.losses, float(np.mean(update.losses))
        if isinstance(update, AlphaUpdate) and not self._losses_exchange:
            array = update.alpha
            if array.dtype != "float32" or array.shape != self._shape:
                raise ProblemError(
                    "invalid_message",
                    f"alpha: is {array.dtype} {list(array.shape)}, the run's is "
                    f"float32 {list(self._shape)}",
                )
            alpha = from_wire(array)
            if not (alpha >= 0).all() or not alpha.any(axis=1).all():
                raise ProblemError("invalid_message", "alpha: must be positive")
            if not np.array_equal(self.algorithm.project(alpha), alpha):
                raise ProblemError(
                    "invalid_message", "alpha: lies outside what the method allows (alpha_min)"
                )
            return self._with_memory(alpha, update.memory), (), update.mean_loss
        raise ProblemError(
            "invalid_message",
            f"exchange: is {update.exchange!r}, the run's is {self.spec.participation.exchange!r}",
        )

    def _with_memory(self, alpha: NDArray[np.float32], memory: Mapping[str, Array]) -> State:
        """A client's alpha together with the run's memory that it took along."""
        if not self.algorithm.shares_memory and memory:
            raise ProblemError("invalid_message", "memory: this method shares none")
        try:
            local = State(alpha=alpha, memory=memory_from_wire(memory))
            self.algorithm.prompt(local)  # reads the memory, and refuses a malformed one
        except ValueError as exc:
            raise ProblemError("invalid_message", f"memory: {exc}") from exc
        return local

    # Rounds

    def _close(self, state: RunState, seat: Seat, now: float) -> Outcome:
        """Puts a finished seat back; the last one ends the round."""
        state = _with(state, seat)
        effects = self._saved(seat)
        if self.vacancies(state) or any(s.phase != "done" for s in state.seats):
            return state, effects
        state, more = self._finish_round(state, now)
        return state, effects + more

    def _saved(self, seat: Seat) -> tuple[Effect, ...]:
        """What the seat's client remembers, to be kept until its next work."""
        if self.remembers_clients and seat.local is not None and seat.local.memory:
            return (MemorySaved(client=seat.client, memory=seat.local.memory),)
        return ()

    def _finish_round(self, state: RunState, now: float) -> Outcome:
        """Aggregates the seats that are done, moves alpha, goes on to the next round."""
        # By enrolment index: a sum's last bit depends on its order.
        seats = sorted(
            (seat for seat in state.seats if seat.phase == "done"),
            key=lambda seat: (seat.client, seat.slot),
        )
        weights = (
            [seat.weight for seat in seats]
            if self.spec.participation.aggregation == "examples"
            else None
        )
        method, server_memory = self._aggregated(state, seats, weights)
        report = RoundReport(
            round=state.round,
            client_id="",
            queries=sum(seat.queries for seat in seats),
            mean_loss=float(np.average([s.mean_loss for s in seats], weights=weights)),
        )
        record = {
            "round": state.round,
            "fills": state.fills,
            "seats": [self._record(seat) for seat in seats],
            "alpha_sha256": alpha_sha256(method.alpha),
        }
        finished = RoundFinished(
            report=report, clients=tuple(seat.client for seat in seats), record=record
        )
        state = replace(
            state,
            round=state.round + 1,
            method=method,
            server_memory=server_memory,
            seats=(),
            passed=frozenset(),
            fills=0,
        )
        if state.round < self.spec.rounds:
            return state, (finished,)
        state, effects = self._end(state, "completed", None, now)
        return state, (finished, *effects)

    def _aggregated(
        self, state: RunState, seats: Sequence[Seat], weights: list[int] | None
    ) -> tuple[State, Memory]:
        """The round's new method state, and the server optimiser's new memory."""
        if self.algorithm.shares_memory:
            if len(seats) == 1:
                return seats[0].local or state.method, state.server_memory
            # Pools have no mean: the seats' losses are told one after the other.
            method = state.method
            for seat in seats:
                asked = self.candidates(state, replace(seat, local=None, step=0))
                method = self.algorithm.tell(method, asked, seat.losses[0])
            return method, state.server_memory
        mean = aggregate([(seat.local or state.method).alpha for seat in seats], weights)
        alpha, memory = self._server_optimizer.apply(state.method.alpha, mean, state.server_memory)
        return State(alpha=self.algorithm.project(alpha)), memory

    def _record(self, seat: Seat) -> dict[str, Any]:
        record: dict[str, Any] = {
            "slot": seat.slot,
            "client": seat.client,
            "num_samples": seat.num_samples,
            "weight": seat.weight,
            "queries": seat.queries,
        }
        if self._losses_exchange:
            return {**record, "losses": [list(losses) for losses in seat.losses]}
        if seat.local is None:
            return record
        arrays = {"alpha": to_wire(seat.local.alpha), **memory_to_wire(seat.local.memory)}
        return {**record, **{name: array.model_dump() for name, array in arrays.items()}}

    # The end

    def _wind_up(
        self, state: RunState, status: RunStatus, reason: str | None, now: float
    ) -> Outcome:
        """Ends a run amid a round: no work stays open, and local steps that were paid for count."""
        effects: list[Effect] = []
        for seat in state.seats:
            state, seat, closed = self._release(state, seat, f"the run ended as {status}", None)
            effects.extend(closed)
            if seat.phase != "done" and seat.step:
                effects.extend(self._saved(seat))
        kept = tuple(replace(seat, phase="done") for seat in state.seats if seat.step)
        state = replace(state, seats=kept)
        if kept:
            state, finished = self._finish_round(state, now)
            effects.extend(finished)
        if state.running:
            state, ended = self._end(state, status, reason, now)
            effects.extend(ended)
        return state, tuple(effects)

    def _end(self, state: RunState, status: RunStatus, reason: str | None, now: float) -> Outcome:
        state = replace(state, status=status, reason=reason, ended_at=now, paused=False)
        return state, (RunEnded(status=status),)

    @_apply.register
    def _(self, event: StopAsked, state: RunState, now: float) -> Outcome:
        if state.paused:
            state = replace(state, status="running")  # so that its open work is wound up
        if not state.running:
            raise ProblemError("run_conflict", f"the run has ended: {state.status}")
        return self._wind_up(state, event.status, event.reason, now)

    @_apply.register
    def _(self, event: ResumeAsked, state: RunState, now: float) -> Outcome:
        if not self.can_resume(state):
            raise ProblemError("run_conflict", f"a run that is {state.status} cannot be resumed")
        state = replace(
            state,
            status="running",
            reason=None,
            ended_at=None,
            lost=0,
            paused=False,
            seats=self._with_new_deadlines(state, now),
            # Whoever resumes a run accepts the model that there is now.
            model=self.gateway_model or state.model,
            metric=state.metric.model_copy(update={"after": None}),
        )
        return state, ()

    def _with_new_deadlines(self, state: RunState, now: float) -> tuple[Seat, ...]:
        part = self.spec.participation
        patience = {"offered": part.claim_timeout_s, "working": part.deadline_s, "done": 0.0}
        return tuple(replace(seat, due=now + patience[seat.phase]) for seat in state.seats)

    @_apply.register
    def _(self, event: Restarted, state: RunState, now: float) -> Outcome:
        account, evaluation = state.account, state.evaluation
        for lease_id, worst in state.evaluation.leases.items():
            account = account.settle(lease_id, worst.without_queries())
            evaluation = evaluation.settle(lease_id, worst)
        # Clients cannot help it that the server was down: their work is still theirs.
        seats = tuple(
            replace(seat, used=seat.used + seat.sent, sent=Usage())
            for seat in self._with_new_deadlines(state, now)
        )
        return replace(state, account=account, evaluation=evaluation, seats=seats), ()

    @_apply.register
    def _(self, event: PauseAsked, state: RunState, now: float) -> Outcome:
        if state.paused:  # Whoever resumes it shall know of this, too.
            told = state.reason or ""
            more = "" if event.reason in told else f"; {event.reason}"
            return replace(state, reason=told + more), ()
        if not state.running:
            return state, ()
        state, effects = self._end(state, "stopped", f"paused: {event.reason}", now)
        return replace(state, paused=True), effects

    @_apply.register
    def _(self, event: ModelSeen, state: RunState, now: float) -> Outcome:
        if event.model in state.models:
            return state, ()
        before = state.models[-1] if state.models else None
        state = replace(state, models=(*state.models, event.model))
        if before is None:
            return state, ()
        reason = f"the provider answers with {event.model!r} now, it was {before!r}"
        pause = PauseAsked(reason=f"{reason}; resume the run to accept it")
        return self._apply(pause, state, now)

    # Spending that the server sees

    @_apply.register
    def _(self, event: GatewayAsked, state: RunState, now: float) -> Outcome:
        seat = self._working(state, event.assignment_id)
        if not state.running:
            raise ProblemError("run_conflict", f"the run is {state.reason or state.status}")
        lease = state.account.leases[event.assignment_id]
        # A request that comes again bills again, but is no new logical query.
        queries = 0 if event.call in seat.calls else event.worst.queries
        if seat.used.queries + queries > lease.queries:
            left = lease.queries - seat.used.queries
            raise ProblemError(
                "lease_exhausted", f"{queries} queries asked, {left} left under the lease"
            )
        sent = seat.sent + event.worst.without_queries()
        used = seat.used + Usage(queries=queries)
        # The lease grows with what is asked again while the caps allow.
        missing = (used + sent).beyond(lease)
        try:
            account = state.account.add(event.assignment_id, missing)
        except BudgetExhausted as exc:
            raise ProblemError("lease_exhausted", str(exc)) from exc
        seat = replace(seat, calls=seat.calls | {event.call}, sent=sent, used=used)
        return replace(_with(state, seat), account=account), ()

    @_apply.register
    def _(self, event: GatewayAnswered, state: RunState, now: float) -> Outcome:
        seat = state.seat_with(event.assignment_id)
        if seat is None:
            return state, ()  # The seat was lost meanwhile, and its call charged in full.
        seat = replace(seat, sent=seat.sent - event.worst, used=seat.used + event.used)
        account = state.account.owe(event.assignment_id, seat.used + seat.sent)
        return replace(_with(state, seat), account=account), ()

    @_apply.register
    def _(self, event: EvaluationReserved, state: RunState, now: float) -> Outcome:
        try:
            state = replace(
                state,
                evaluation=state.evaluation.add(event.lease_id, event.worst),
                account=state.account.add(event.lease_id, event.worst.without_queries()),
            )
        except BudgetExhausted as exc:
            raise ProblemError("lease_exhausted", str(exc)) from exc
        return state, ()

    @_apply.register
    def _(self, event: EvaluationSettled, state: RunState, now: float) -> Outcome:
        try:
            state = replace(
                state,
                evaluation=state.evaluation.settle(event.lease_id, event.used),
                account=state.account.settle(event.lease_id, event.used.without_queries()),
            )
        except UnknownLease as exc:
            raise ProblemError("not_found", str(exc)) from exc
        return state, ()

    @_apply.register
    def _(self, event: Measured, state: RunState, now: float) -> Outcome:
        if event.which == "after" and state.running:
            return state, ()  # The run was resumed meanwhile: this prompt was not its last.
        metric = state.metric.model_copy(update={event.which: event.value})
        return replace(state, metric=metric), ()


def _with(state: RunState, seat: Seat) -> RunState:
    seats = tuple(seat if s.slot == seat.slot else s for s in state.seats)
    return replace(state, seats=seats)


def _without(state: RunState, seat: Seat) -> RunState:
    return replace(state, seats=tuple(s for s in state.seats if s.slot != seat.slot))
