"""Invariants of any order of events."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fedone_sdk.aggregator.rounds import lifecycle, seats, spending
from fedone_sdk.aggregator.rounds.run_state import Result, RunState
from fedone_sdk.budget import NOTHING, Budget, Usage
from fedone_sdk.messages import LossesAssignment, Scored
from tests.unit.machine.game import GATEWAY_QUERY, HERE, MODEL, Game, answer_to, spec_of


class AnyOrder(RuleBasedStateMachine):
    """Events in any order; `Game.apply` checks every step."""

    @initialize(
        method=st.sampled_from(["gs-bdpl", "gs-bdpl", "bdpl", "random"]),
        exchange=st.sampled_from(["alpha", "losses"]),
        clients_per_round=st.integers(1, 3),
        local_steps=st.integers(1, 3),
        selection=st.sampled_from(["uniform", "proportional"]),
        optimizer=st.sampled_from(["sgd", "adamw"]),
        gateway=st.booleans(),
        trusted=st.booleans(),
        rounds=st.integers(1, 4),
        max_lost=st.integers(1, 4),
        max_renewals=st.integers(0, 3),
        queries=st.none() | st.integers(0, 60),
        requests=st.none() | st.integers(0, 90),
        usd=st.none() | st.decimals("0", "0.5", places=3),
    )
    def begin(
        self,
        method: str,
        exchange: str,
        clients_per_round: int,
        local_steps: int,
        selection: str,
        optimizer: str,
        gateway: bool,
        trusted: bool,
        rounds: int,
        max_lost: int,
        max_renewals: int,
        queries: int | None,
        requests: int | None,
        usd: Decimal | None,
    ) -> None:
        options: dict[str, Any] = {"name": method, "local_steps": local_steps}
        if method != "random":
            options["optimizer"] = optimizer
        else:
            exchange = "losses"
            clients_per_round = 1 if local_steps > 1 else clients_per_round
        # Without a gateway the server can bound queries only; the service refuses other caps.
        caps = {"queries": queries}
        if gateway:
            caps |= {"requests": requests, "usd": usd}  # type: ignore[dict-item]
        budget = {unit: cap for unit, cap in caps.items() if cap is not None}
        part = {"exchange": exchange, "clients_per_round": clients_per_round, "min_clients": 1}
        part |= {"selection": selection, "own_models": "trusted" if trusted else "charged"}
        options |= {"rounds": rounds, "budget": budget or None, "participation": part}
        limits = {"MAX_LOST": max_lost, "MAX_RENEWALS": max_renewals}
        self.game = Game(spec_of(**options), gateway=gateway, **limits)
        self.memories: dict[int, Any] = {}
        self.known: list[Any] = []
        self.calls: list[dict[str, Any]] = []
        self.may_have_been_sent = NOTHING
        self.evaluations: list[tuple[str, Usage]] = []

    @property
    def state(self) -> RunState:
        return self.game.state

    def apply(self, handler: Any, **data: Any) -> Result[Any]:
        result = self.game.apply(handler, **data)
        self.memories.update(result.memories)
        if handler is seats.assign and result.reply is not None:
            self.known.append(result.reply)
        return result

    @rule(clients=st.dictionaries(st.integers(0, 5), st.integers(1, 9), max_size=6))
    def seats_vacant(self, clients: dict[int, int]) -> None:
        self.apply(seats.fill, available=clients)

    @rule(client=st.integers(0, 5))
    def work_asked(self, client: int) -> None:
        before = self.state.account.leases
        seat = self.state.seat_of(client)
        self.game.made += 1
        memory = self.memories.get(client, {}) if self.game.machine.remembers_clients else {}
        work = f"work-{self.game.made}"
        result = self.apply(seats.assign, client=client, assignment_id=work, memory=memory)
        if seat is None or seat.phase == "working":
            assert self.state.account.leases == before
            assert (result.reply is not None) == (seat is not None and self.state.running)

    @rule()
    def every_seat_works(self) -> None:
        for seat in self.state.seats:
            if seat.phase == "offered":
                self.work_asked(seat.client)

    @precondition(lambda self: self.known)
    @rule(
        data=st.data(),
        model=st.sampled_from([MODEL, MODEL, MODEL, MODEL, "model-b"]),
        scored=st.sampled_from([Scored(scored=2), Scored(scored=2), Scored(scored=1, failed=1)]),
        loss=st.floats(-1e6, 1e6),
        reported=st.integers(0, 9),
    )
    def update(
        self, data: st.DataObject, model: str, scored: Scored, loss: float, reported: int
    ) -> None:
        work = data.draw(st.sampled_from(self.known))
        changes: dict[str, Any] = {"model": model, "scored": scored}
        changes["usage"] = Usage(queries=reported, requests=reported)
        if isinstance(work, LossesAssignment):
            changes["losses"] = (loss, *([0.25] * (work.prompts.shape[0] - 1)))
        self.game.send(work, answer_to(self.game, work).model_copy(update=changes))

    @precondition(lambda self: self.known)
    @rule(data=st.data(), reported=st.integers(0, 9), unfit=st.booleans())
    def declined(self, data: st.DataObject, reported: int, unfit: bool) -> None:
        work = data.draw(st.sampled_from(self.known))
        usage = Usage(queries=reported)
        self.apply(
            seats.decline,
            assignment_id=work.assignment_id,
            reason="tired",
            usage=usage,
            unfit=unfit,
        )

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def renewed(self, data: st.DataObject) -> None:
        work = data.draw(st.sampled_from(self.known))
        self.apply(seats.renew, assignment_id=work.assignment_id)

    @precondition(lambda self: self.known and self.game.machine.gateway_model)
    @rule(data=st.data(), queries=st.integers(1, 12), retry=st.booleans())
    def gateway_asked(self, data: st.DataObject, queries: int, retry: bool) -> None:
        work = data.draw(st.sampled_from(self.known))
        worst = GATEWAY_QUERY * queries
        seat = self.state.seat_with(work.assignment_id)
        known = sorted(seat.calls) if retry and seat is not None else []
        call = known[0] if known else None
        asked = self.game.call(work, worst, call)
        if self.apply(spending.reserve_call, **asked).refusal is None:
            self.calls.append(asked)
            self.may_have_been_sent += worst.without_queries() if known else worst

    @precondition(lambda self: self.calls)
    @rule(data=st.data(), share=st.integers(0, 4))
    def gateway_answered(self, data: st.DataObject, share: int) -> None:
        position = data.draw(st.integers(0, len(self.calls) - 1))
        asked = self.calls.pop(position)
        worst = asked["worst"].without_queries()
        used = Usage(requests=worst.requests * share // 4)
        seat = self.state.seat_with(asked["assignment_id"])
        in_time = seat is not None and asked["reservation_id"] in seat.sent
        self.game.answered(asked, used)
        if in_time:
            back = {u: getattr(worst, u) - getattr(used, u) for u in Usage.model_fields}
            sent = self.may_have_been_sent
            self.may_have_been_sent = Usage(**{u: getattr(sent, u) - back[u] for u in back})

    @rule(queries=st.integers(1, 5))
    def evaluation_reserved(self, queries: int) -> None:
        lease_id = f"{HERE}/evaluation-{len(self.evaluations)}-{self.game.made}-{queries}"
        if lease_id in self.state.evaluation.leases:
            return
        worst = GATEWAY_QUERY * queries
        if self.apply(spending.reserve_evaluation, lease_id=lease_id, worst=worst).refusal is None:
            self.evaluations.append((lease_id, worst))

    @precondition(lambda self: self.evaluations)
    @rule(data=st.data())
    def evaluation_settled(self, data: st.DataObject) -> None:
        position = data.draw(st.integers(0, len(self.evaluations) - 1))
        lease_id, worst = self.evaluations.pop(position)
        used = Usage(queries=worst.queries)
        self.apply(spending.settle_evaluation, lease_id=lease_id, used=used)

    @rule(seconds=st.sampled_from([1, 10, 60, 100]))
    def time_passes(self, seconds: float) -> None:
        self.game.now += seconds
        self.apply(seats.expire)

    @rule(down=st.booleans())
    def restarted(self, down: bool) -> None:
        self.apply(lifecycle.charge_lost_replicas, alive=frozenset({"another"}), down=down)
        self.evaluations.clear()

    @rule()
    def another_replica_restarted(self) -> None:
        before = self.state.seats
        self.apply(lifecycle.charge_lost_replicas, alive=frozenset({HERE}), down=False)
        assert self.state.seats == before

    @rule(client=st.integers(0, 5))
    def quarantined(self, client: int) -> None:
        self.apply(seats.quarantine, client=client, reason="lies")
        assert self.state.seat_of(client) is None

    @rule(client=st.integers(0, 5))
    def changed(self, client: int) -> None:
        self.apply(seats.clear_unfit, client=client)
        assert client not in self.state.unfit

    @rule(client=st.integers(0, 5))
    def released(self, client: int) -> None:
        self.apply(seats.lift_quarantine, client=client)

    @rule(data=st.data())
    def rolled_back(self, data: st.DataObject) -> None:
        spent, before = self.game.spent, self.state
        to_round = data.draw(st.integers(0, before.round))
        start = self.game.machine.initial_state().method
        result = self.apply(
            lifecycle.roll_back, method=start, to_round=to_round, reason="a lying client"
        )
        if result.refusal is None:
            assert (self.state.round, self.state.seats) == (to_round, ())
            assert self.state.rollbacks == before.rollbacks + 1
            assert self.game.spent.queries >= spent.queries

    @rule(model=st.sampled_from(["m-1", "m-2"]))
    def model_seen(self, model: str) -> None:
        self.apply(lifecycle.record_model, model=model)

    @rule()
    def pause(self) -> None:
        self.apply(lifecycle.pause, reason="the key was revoked")

    @rule(status=st.sampled_from(["stopped", "failed"]))
    def stop(self, status: Any) -> None:
        self.apply(lifecycle.stop, status=status)

    @rule()
    def resume(self) -> None:
        self.apply(lifecycle.resume)

    @rule(unit=st.sampled_from(["queries", "requests", "usd"]), cap=st.integers(0, 90))
    def raise_caps(self, unit: str, cap: int) -> None:
        before, account = self.state, self.state.account
        held = getattr(account.held, unit)
        now = None if account.cap is None else getattr(account.cap, unit)
        result = self.apply(lifecycle.raise_caps, caps=Budget(**{unit: cap}))
        assert self.state.account.held == account.held
        if result.refusal is not None:
            assert now is None or cap < max(now, held) or before.status == "completed"
        elif cap != now:
            assert account.cap is not None
            assert self.state.account.cap == account.cap.model_copy(update={unit: cap})
            assert cap > now
            goes_on = ("running", "budget_exhausted", "completed")
            assert self.state.running is (before.status in goes_on)

    @rule(value=st.floats(0, 1))
    def measured(self, value: float) -> None:
        self.apply(lifecycle.record_metric, which="before", value=value)

    @invariant()
    def what_may_have_been_sent_is_held(self) -> None:
        if not hasattr(self, "game"):
            return
        held = self.state.account.held
        for unit in Usage.model_fields:
            assert getattr(self.may_have_been_sent, unit) <= getattr(held, unit)
        reported = sum(report.queries for report in self.game.reports)
        assert reported <= self.state.account.spent.queries

    def teardown(self) -> None:
        """However it came here, the run can be played to an end that leaves nothing open."""
        if not hasattr(self, "game"):
            return
        for lease_id, worst in self.evaluations:
            self.apply(spending.settle_evaluation, lease_id=lease_id, used=worst)
        if self.state.status in ("stopped", "failed"):
            self.apply(lifecycle.resume)
        for client in self.state.quarantined:
            self.apply(seats.lift_quarantine, client=client)
        self.game.play(range(6))
        assert self.state.status in ("completed", "budget_exhausted", "failed")
        assert self.state.account.leased == NOTHING


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
