"""A round machine under test, checked at every step."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from fedone_sdk.aggregator.rounds import ONE_QUERY, RoundMachine
from fedone_sdk.aggregator.rounds.run_state import (
    Closed,
    FinishedRound,
    Result,
    RunState,
    arrays_of,
    decode,
    encode_document,
)
from fedone_sdk.aggregator.rounds.seats import assign, assignment, expire, fill
from fedone_sdk.aggregator.rounds.spending import reserve_call, settle_call
from fedone_sdk.aggregator.rounds.updates import accept
from fedone_sdk.algorithms import State, dump_memory, stream
from fedone_sdk.budget import NOTHING, Account, Usage
from fedone_sdk.errors import ProblemError
from fedone_sdk.messages import (
    AlphaAssignment,
    AlphaUpdate,
    LossesAssignment,
    LossesUpdate,
    Scored,
    Tensor,
)
from fedone_sdk.messages.tensor import from_wire, to_wire
from fedone_sdk.spec import RunSpec

N, LENGTH, SAMPLES, MODEL = 3, 2, 4, "model-a"
HERE = "this-replica"
ALL_GONE: dict[str, Any] = {"alive": frozenset({"another"}), "down": True}
GATEWAY_QUERY = Usage(queries=1, requests=2, prompt_tokens=10, usd=Decimal("0.01"))


def spec_of(
    *,
    rounds: int = 3,
    budget: Mapping[str, Any] | None = None,
    participation: Mapping[str, Any] | None = None,
    evaluation: Mapping[str, Any] | None = None,
    **method: Any,
) -> RunSpec:
    name = method.get("name", "gs-bdpl")
    few: dict[str, Any] = {"num_samples": SAMPLES, "batch_size": 2}
    local = {} if name in ("random", "thompson") else {"optimizer": "sgd", "learning_rate": 0.01}
    if name == "gs-bdpl":
        few["tau"] = 1.0  # at this temperature the prompts of a step differ, so that alpha moves
    return RunSpec.model_validate(
        {
            "task": {"template": "{prompt} {text} {mask}", "labels": {0: " no", 1: " yes"}},
            "prompt": {
                "length": LENGTH,
                "vocabulary": {"kind": "list", "candidates": ["a", "b", "c"]},
            },
            "method": {"name": name, **few, **local, **method},
            "participation": {"deadline_s": 100, "model": MODEL, **(participation or {})},
            "calibration": "none",
            "budget": budget,
            "rounds": rounds,
            "evaluation": evaluation or {},
        }
    )


def plain(value: object) -> Any:
    """A value with nothing in it that compares by identity: arrays as dtype, shape and bytes."""
    if isinstance(value, ProblemError):
        return value.code, value.detail
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    return value


def saved_and_loaded(state: RunState) -> RunState:
    return decode(json.loads(encode_document(state)), dump_memory(arrays_of(state)))


class Game:
    """A machine, its state, and a clock; checks at every step what must hold at every step."""

    def __init__(self, spec: RunSpec, *, gateway: bool = False, **limits: int) -> None:
        self.machine = RoundMachine(
            "run",
            spec,
            vocab_size=N,
            worst_query=GATEWAY_QUERY if gateway else ONE_QUERY,
            gateway_model=MODEL if gateway else None,
        )
        for name, limit in limits.items():
            setattr(self.machine, name, limit)
        self.spec = spec
        self.state = self.machine.initial_state()
        self.now = 1000.0
        self.made = 0
        self.closed: list[Closed] = []
        self.rounds: list[FinishedRound] = []
        self.log: list[tuple[str, Any]] = []
        self.memories: list[tuple[int, Any]] = []
        self.over = set[str]()
        self.check(self.state)

    def apply(self, handler: Callable[..., Result[Any]], **data: Any) -> Result[Any]:
        """Apply a handler; a refusal is in the result, and leaves the state as it is."""
        before, frozen = self.state, plain(self.state)
        result = self._step(before, handler, data)
        # Pure: the same inputs give the same outputs, and stay as they are; a restart in between
        # makes no difference.
        assert plain(before) == frozen
        again = self._step(saved_and_loaded(before), handler, data)
        assert plain(again) == plain(result)
        after = result.state
        self.check(after, before)
        if result.refusal is not None and result.refusal.code != "model_mismatch":
            assert after is before
        # Work ends once, with its update or without.
        over = [one.assignment_id for one in result.closed]
        assert sorted(over) == sorted(_working(before) - _working(after))
        assert self.over.isdisjoint(over)
        self.over.update(over)
        self.state = after
        self.closed += result.closed
        self.rounds += [] if result.finished is None else [result.finished]
        self.log += result.log
        self.memories += result.memories.items()
        return result

    def _step(self, state: RunState, handler: Any, data: dict[str, Any]) -> Result[Any]:
        try:
            return self.machine.handle(state, self.now, handler, **data)
        except ProblemError as refusal:
            return Result(state=state, refusal=refusal)

    def check(self, state: RunState, before: RunState | None = None) -> None:
        assert plain(saved_and_loaded(state)) == plain(state)
        for account in (state.account, state.evaluation):
            check_within_cap(account)
        participation = self.spec.participation
        numbers = {seat.number for seat in state.seats}
        assert len(numbers) == len(state.seats)
        assert all(0 <= number < participation.clients_per_round for number in numbers)
        if participation.selection == "uniform":
            assert len({seat.client for seat in state.seats}) == len(state.seats)
        assert state.quarantined.isdisjoint(seat.client for seat in state.seats)
        assert state.unfit.keys().isdisjoint(s.client for s in state.seats if s.phase != "done")
        leased = {lease for lease in state.account.leases if "evaluation" not in lease}
        assert _working(state) == leased
        # A pause, and a stop that keeps the open work, leave seats for a resume.
        assert state.status in ("running", "stopped") or not state.seats
        assert 0 <= state.round <= self.spec.rounds
        if before is not None:
            back = state.rollbacks - before.rollbacks
            assert back in (0, 1)
            assert state.round - before.round in (0, 1) or (back and state.round < before.round)
            for unit in Usage.model_fields:
                assert getattr(state.account.spent, unit) >= getattr(before.account.spent, unit)
        if state.status == "completed":
            finished = self.machine.at(state).method.finished(state.method)
            assert state.round == self.spec.rounds or finished
        assert np.isfinite(state.method.alpha).all()
        assert (state.method.alpha >= 0).all()

    # What well-behaved clients do

    def seat(self, clients: Iterable[int] = (0, 1, 2), held: int = 5) -> list[int]:
        """Offer free seats; return the clients that got one."""
        before = len(self.state.seats)
        self.apply(fill, available=dict.fromkeys(clients, held))
        return [seat.client for seat in self.state.seats[before:]]

    def claim(self, client: int, **more: Any) -> AlphaAssignment | LossesAssignment | None:
        self.made += 1
        work: AlphaAssignment | LossesAssignment | None = self.apply(
            assign, client=client, assignment_id=f"work-{self.made}", **more
        ).reply
        return work

    def take(self, clients: Iterable[int] = (0, 1, 2)) -> AlphaAssignment | LossesAssignment:
        """Seats a client and gives it its work."""
        seated = [seat.client for seat in self.state.seats if seat.phase == "offered"]
        assignment = self.claim((seated or self.seat(clients))[0])
        assert assignment is not None
        return assignment

    def update_for(
        self, work: AlphaAssignment | LossesAssignment, **changes: Any
    ) -> AlphaUpdate | LossesUpdate:
        common: dict[str, Any] = {
            "num_examples": 5,
            "scored": Scored(scored=2),
            "usage": NOTHING,
            "model": MODEL,
        }
        if isinstance(work, LossesAssignment):
            losses = tuple(0.5 + 0.1 * i for i in range(work.prompts.shape[0]))
            return LossesUpdate(**{**common, "losses": losses, **changes})
        alpha = np.frombuffer(work.alpha.data, "<f4").reshape(work.alpha.shape)
        packed = Tensor.from_bytes((alpha * np.float32(1.25)).tobytes(), alpha.shape, "float32")
        return AlphaUpdate(**{**common, "alpha": packed, "mean_loss": 0.5, **changes})

    def send(
        self,
        work: AlphaAssignment | LossesAssignment,
        update: AlphaUpdate | LossesUpdate | None = None,
    ) -> Result[Any]:
        return self.apply(
            accept,
            assignment_id=work.assignment_id,
            update=self.update_for(work) if update is None else update,
            body_sha256="ab" * 32,
        )

    def gateway(self, work: AlphaAssignment | LossesAssignment, queries: int) -> None:
        """Asks the model for some queries, which cost half of the worst case."""
        call = self.call(work, self.machine.worst_query * queries)
        assert self.apply(reserve_call, **call).refusal is None
        self.answered(call, Usage(requests=queries))

    def call(
        self, work: AlphaAssignment | LossesAssignment, worst: Usage, call: str | None = None
    ) -> dict[str, Any]:
        """A reservation of the gateway; for a separate request unless `call` names it."""
        self.made += 1
        return {
            "assignment_id": work.assignment_id,
            "call": f"call-{self.made}" if call is None else call,
            "reservation_id": f"{HERE}/{self.made}",
            "worst": worst,
        }

    def answered(self, call: Mapping[str, Any], used: Usage) -> None:
        """An attempt ends."""
        ids = {key: call[key] for key in ("assignment_id", "reservation_id")}
        reserved = call["worst"].without_queries()
        self.apply(settle_call, **ids, used=used, reserved=reserved)

    def play(self, clients: Iterable[int] = (0, 1, 2), most: int = 500) -> None:
        """Play to the end of the run, with clients that do all their work."""
        for _ in range(most):
            if not self.state.running:
                return
            self.advance(11)
            if self.machine.at(self.state).needs_seating(self.state):
                self.seat(clients)
            offered = [seat.client for seat in self.state.seats if seat.phase == "offered"]
            for client in offered:
                self.claim(client)
            for seat in self.state.seats:
                if self.state.seat_with(seat.assignment_id or "") is not None:
                    work = assignment(self.machine, self.state, seat, self.now)
                    if self.machine.gateway_model and not seat.used.queries:
                        self.gateway(work, work.leased_queries)
                    self.send(work, answer_to(self, work))
        pytest.fail(f"the run did not end: {self.state}")

    def advance(self, seconds: float) -> Result[Any]:
        self.now += seconds
        return self.apply(expire)

    @property
    def reports(self) -> list[Any]:
        return [finished.report for finished in self.rounds]

    @property
    def spent(self) -> Usage:
        return self.state.account.spent

    @property
    def leased(self) -> Usage:
        return self.state.account.leased


def _working(state: RunState) -> set[str]:
    """The work that is out."""
    return {str(seat.assignment_id) for seat in state.seats if seat.phase == "working"}


def check_within_cap(account: Account) -> None:
    if account.cap is None:
        return
    held = account.held.model_dump()
    held["tokens"] = held["prompt_tokens"] + held["completion_tokens"]
    for unit, cap in account.cap.model_dump(exclude_none=True).items():
        assert held[unit] <= cap, f"{held[unit]} {unit} of {cap}"


def refusal(result: Result[Any]) -> ProblemError:
    assert result.refusal is not None
    return result.refusal


both = pytest.mark.parametrize("exchange", ["alpha", "losses"])
ALPHA, LOSSES = {"exchange": "alpha"}, {"exchange": "losses"}


def answer_to(game: Game, work: AlphaAssignment | LossesAssignment) -> AlphaUpdate | LossesUpdate:
    """The answer of a device whose losses depend only on prompts and mini-batch."""

    def losses_of(rows: list[list[float]], seed: int) -> tuple[float, ...]:
        return tuple((3 * sum(row) + row[0] + seed % 7) / 10 for row in rows)

    if isinstance(work, LossesAssignment):
        losses = losses_of(work.prompts.rows(), work.minibatch_seed)
        return game.update_for(work, losses=losses)
    method = game.machine.method
    state = State(alpha=from_wire(work.alpha))
    for step in work.steps:
        asked = method.ask(state, stream(step.prompt_seed), step.num_samples)
        rows = asked.prompts.astype(float).tolist()
        state = method.tell(state, asked, losses_of(rows, step.minibatch_seed))
    return game.update_for(work, alpha=to_wire(state.alpha))
