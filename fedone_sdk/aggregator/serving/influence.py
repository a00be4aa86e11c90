"""Influence of each client on a run."""

from __future__ import annotations

import math

from fedone_sdk.aggregator.rounds.rules import Rules
from fedone_sdk.aggregator.rounds.state import RunState
from fedone_sdk.algorithms.defence import ledger
from fedone_sdk.messages import ClientInfluence


def client_influences(rules: Rules, state: RunState) -> dict[int, ClientInfluence]:
    """Return each client's contribution, quarantine and privacy loss, by enrolment index."""
    judged = {line.client: line for line in ledger(state.defence)}
    movement = math.fsum(line.movement for line in judged.values())
    found = {}
    for client in sorted(judged.keys() | state.quarantined | state.releases.keys()):
        line, releases = judged.get(client), state.releases.get(client, 0)
        noised = rules.releases
        of_defence = (
            {}
            if line is None
            else {
                "rounds": line.rounds,
                "movement": line.movement,
                "share": line.movement / movement if movement else 0.0,
                "scaled": line.scaled,
                "outliers": line.outliers,
                "score": line.score,
                "loss_residual": line.loss_residual,
            }
        )
        found[client] = ClientInfluence.model_validate(
            {
                **of_defence,
                "quarantined": client in state.quarantined,
                "releases": releases,
                "epsilon": None if noised is None else noised.accountant.epsilon(releases),
            }
        )
    return found
