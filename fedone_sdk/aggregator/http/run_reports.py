"""What a caller may read of runs, by role. No other module decides it.

A device reads the names and states of its runs, their tasks, candidates and prompts; only the last
two depend on other devices' rows. A viewer reads reports without the words
of others, because a provider's may quote a text, and a device's may quote a row. An operator reads
everything. All of it is of the runs that the caller's token is for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
from numpy.typing import NDArray

from fedone_sdk.aggregator.access.tokens import AdminToken
from fedone_sdk.aggregator.http.context import RequestContext
from fedone_sdk.aggregator.rounds import RoundMachine
from fedone_sdk.aggregator.rounds.state import RunState
from fedone_sdk.aggregator.runs.served_run import ServedRun
from fedone_sdk.aggregator.service import Service
from fedone_sdk.algorithms.defence import ledger
from fedone_sdk.messages import (
    ClientInfluence,
    LostWork,
    PositionProbabilities,
    RunEntry,
    RunResult,
    RunSummary,
    TokenProbability,
)
from fedone_sdk.vocabulary import Vocabulary


def listed(service: Service, context: RequestContext) -> Sequence[RunSummary | RunEntry]:
    """Return the caller's runs, in order of creation."""
    found = [one for one in service.registry.summaries if context.may_see(one.run_id)]
    if context.person is None:
        return [one.entry for one in found]
    return [service.with_devices(one) for one in found]


def result_of(service: Service, run: ServedRun, person: AdminToken) -> RunResult:
    """Return the current or final result of a run."""
    result, all_words = run.result(), person.allows("operator")
    if run.state.running:
        devices = service.dispatcher.count_devices(run, reasons=all_words)
        result = result.model_copy(update={"devices": devices})
    if all_words:
        return result
    proposer = result.proposer and result.proposer.model_copy(update={"failure": None})
    shown = {"reason": run.state.summary or result.reason, "proposer": proposer}
    return result.model_copy(update=shown)


def lost_work_of(run: ServedRun, person: AdminToken) -> tuple[LostWork, ...]:
    """Return the newest lost assignments of a run, oldest first."""
    if person.allows("operator"):
        return tuple(run.lost)
    return tuple(one.model_copy(update={"said": None}) for one in run.lost)


def likeliest(
    alpha: NDArray[np.float32], vocabulary: Vocabulary, top: int
) -> tuple[PositionProbabilities, ...]:
    """Return the `top` most probable tokens of every position.

    Normalised rows of `alpha`, shape (n, N), are the token probabilities; for Gumbel-Softmax, their
    limit at temperature 0. They are 0 for candidates that a position does not have.
    """
    weights = alpha.astype(np.float64)
    shares = weights / weights.sum(axis=1, keepdims=True)
    # Candidates with probability 0 contribute nothing to the entropy.
    logs = np.log2(shares, out=np.zeros_like(shares), where=shares > 0)
    entropies = -(shares * logs).sum(axis=1)
    order = np.argsort(-shares, axis=1, kind="stable")[:, :top]
    positions = []
    for position, (entropy, row, known) in enumerate(zip(entropies, order, shares, strict=True)):
        candidates = vocabulary.of_position(position)
        positions.append(
            PositionProbabilities(
                entropy=abs(round(float(entropy), 6)),
                tokens=tuple(
                    TokenProbability(
                        token=candidates[index], probability=round(float(known[index]), 6)
                    )
                    for index in row.tolist()
                    if index < len(candidates)
                ),
            )
        )
    return tuple(positions)


def client_influences(machine: RoundMachine, state: RunState) -> dict[int, ClientInfluence]:
    """Return each client's contribution, quarantine and privacy loss, by enrolment index."""
    judged = {line.client: line for line in ledger(state.defence)}
    movement = math.fsum(line.movement for line in judged.values())
    found = {}
    for client in sorted(judged.keys() | state.quarantined | state.releases.keys()):
        of_defence: dict[str, float] = {}
        if (line := judged.get(client)) is not None:
            of_defence = {**asdict(line), "share": line.movement / movement if movement else 0.0}
            del of_defence["client"]
        releases, noised = state.releases.get(client, 0), machine.releases
        found[client] = ClientInfluence.model_validate(
            {
                **of_defence,
                "quarantined": client in state.quarantined,
                "releases": releases,
                "epsilon": None if noised is None else noised.accountant.epsilon(releases),
            }
        )
    return found
