"""The first work of a planned run, made by the round machine itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from fedone_sdk.aggregator import RoundMachine
from fedone_sdk.aggregator.events import Assigned, SeatsVacant, WorkAsked
from fedone_sdk.aggregator.state import RunState
from fedone_sdk.errors import SpecError
from fedone_sdk.messages import AlphaAssignment, LossesAssignment
from fedone_sdk.simulation.federation import Federation
from fedone_sdk.spec import RunSpec

__all__ = ["Exchange", "WORK_ID", "alone", "first_work", "planned_machine"]

Exchange = Literal["alpha", "losses"]

WORK_ID = "0" * 32
"""As long as any other."""


def alone(spec: RunSpec, exchange: Exchange) -> RunSpec:
    """A run whose first assignment can be looked at: nobody is waited for, nothing is paid."""
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
    """The work of the client that is chosen first in a round, by the machine itself."""
    available = {index: len(shard) for index, shard in enumerate(federation.shards)}
    state = replace(machine.start(), round=round_number)
    state, _ = machine.step(state, SeatsVacant(available=available), 0.0)
    asked = WorkAsked(client=state.seats[0].client, assignment_id=WORK_ID)
    state, effects = machine.step(state, asked, 0.0)
    return state, next(e.assignment for e in effects if isinstance(e, Assigned))


def planned_machine(federation: Federation, spec: RunSpec, model: str) -> RoundMachine:
    """The machine of a run that is only planned.

    Args:
        federation: Where its data and vocabulary are.
        spec: The run.
        model: Fingerprint of the gateway's model; empty for none.

    Raises:
        SpecError: The method's settings do not fit each other.
    """
    try:
        return RoundMachine.of(spec.name, spec, federation.vocabulary, gateway_model=model or None)
    except ValueError as exc:
        raise SpecError(f"method: {exc}") from exc
