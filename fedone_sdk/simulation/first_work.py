"""The first assignment of a planned run, made by the round machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from fedone_sdk.aggregator import RoundMachine
from fedone_sdk.aggregator.rounds.events import Assigned, SeatsVacant, WorkRequested
from fedone_sdk.aggregator.rounds.state import RunState
from fedone_sdk.errors import SpecError
from fedone_sdk.messages import AlphaAssignment, LossesAssignment
from fedone_sdk.simulation.federation import Federation
from fedone_sdk.spec import RunSpec

Exchange = Literal["alpha", "losses"]

WORK_ID = "0" * 32
"""A placeholder with the usual length."""


def unbudgeted(spec: RunSpec, exchange: Exchange) -> RunSpec:
    """Return the run with one client per round and no budget, for its first assignment."""
    participation = {"exchange": exchange, "min_clients": 1}
    return spec.model_copy(
        update={
            "participation": spec.participation.model_copy(update=participation),
            "budget": None,
        }
    )


def first_work(
    federation: Federation, machine: RoundMachine, round_number: int
) -> tuple[RunState, AlphaAssignment | LossesAssignment]:
    """Return the assignment of the first client that a round selects, from the round machine."""
    available = {index: len(shard) for index, shard in enumerate(federation.shards)}
    state = replace(machine.initial_state(), round=round_number)
    state, _ = machine.step(state, SeatsVacant(available=available), 0.0)
    asked = WorkRequested(client=state.seats[0].client, assignment_id=WORK_ID)
    state, effects = machine.step(state, asked, 0.0)
    return state, next(e.assignment for e in effects if isinstance(e, Assigned))


def planned_machine(federation: Federation, spec: RunSpec, model: str) -> RoundMachine:
    """Return the round machine of a planned run.

    Raises:
        SpecError: The method's settings do not fit each other.
    """
    try:
        return RoundMachine.of(spec.name, spec, federation.vocabulary, gateway_model=model or None)
    except ValueError as exc:
        raise SpecError(f"method: {exc}") from exc
