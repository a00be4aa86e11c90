"""Routes for monitoring: seats, influence of clients, token probabilities."""

from __future__ import annotations

import math

import numpy as np
from aiohttp import web
from numpy.typing import NDArray
from pydantic import TypeAdapter

from fedone_sdk.aggregator.http.requests import answer
from fedone_sdk.aggregator.rounds import RoundMachine
from fedone_sdk.aggregator.rounds.state import RunState
from fedone_sdk.aggregator.routes.context import SERVICE, person_of, run_of
from fedone_sdk.aggregator.routes.reports import lost_work_of
from fedone_sdk.aggregator.routes.route import RouteTable
from fedone_sdk.aggregator.runtime import in_thread
from fedone_sdk.algorithms.defence import ledger
from fedone_sdk.errors import ProblemError
from fedone_sdk.messages import (
    ClientInfluence,
    PositionProbabilities,
    SeatReport,
    Seats,
    TokenProbabilities,
    TokenProbability,
)
from fedone_sdk.vocabulary import Vocabulary

route = RouteTable("runs")

_INFLUENCES: TypeAdapter[list[ClientInfluence]] = TypeAdapter(list[ClientInfluence])
_MOST_TOKENS = 32
_TOKENS = 8


@route("GET /v1/runs/{run_id}/seats", "viewer", Seats)
async def seats(request: web.Request) -> web.Response:
    """Return the seats of the current round, the waiting clients, and the newest lost work."""
    run = await run_of(request)
    service, state = request.app[SERVICE], run.state
    now = service.clock.now()
    busy = {seat.client for seat in state.seats if seat.phase != "done"}
    waiting = service.dispatcher.available(run).keys() - busy
    names = await service.access.names([seat.client for seat in state.seats])
    found = [
        SeatReport(
            slot=seat.slot,
            client_id=name,
            phase=seat.phase,
            step=seat.step,
            due_in_s=None if seat.phase == "done" else round(max(seat.due - now, 0.0), 3),
        )
        for seat, name in zip(state.seats, names, strict=True)
    ]
    return answer(
        Seats(
            round=state.round,
            waiting=len(waiting),
            seats=tuple(found),
            lost=lost_work_of(run, person_of(request)),
        )
    )


@route(
    "GET /v1/runs/{run_id}/probabilities",
    "viewer",
    TokenProbabilities,
    query={"top": {"type": "integer", "minimum": 1, "maximum": _MOST_TOKENS}},
)
async def probabilities(request: web.Request) -> web.Response:
    """Return the most probable tokens of each position of a run."""
    given = request.query.get("top", str(_TOKENS))
    short = len(given) <= len(str(_MOST_TOKENS)) and given.isascii() and given.isdigit()
    if not (short and 1 <= int(given) <= _MOST_TOKENS):
        raise ProblemError("invalid_message", f"top: must be from 1 to {_MOST_TOKENS}")
    run = await run_of(request)
    state = run.state
    # Up to four million numbers.
    positions = await in_thread(likeliest, state.method.alpha, run.vocabulary, int(given))
    return answer(
        TokenProbabilities(round=state.round, vocab_size=len(run.vocabulary), positions=positions)
    )


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


@route("GET /v1/runs/{run_id}/clients", "viewer", list[ClientInfluence])
async def run_clients(request: web.Request) -> web.Response:
    """Return each client's influence on a run, by its defences and privacy accounting."""
    run = await run_of(request)
    lines = client_influences(run.machine, run.state)
    names = await request.app[SERVICE].access.names(list(lines))
    found = [
        line.model_copy(update={"client_id": name})
        for line, name in zip(lines.values(), names, strict=True)
    ]
    return web.Response(body=_INFLUENCES.dump_json(found), content_type="application/json")


def client_influences(machine: RoundMachine, state: RunState) -> dict[int, ClientInfluence]:
    """Return each client's contribution, quarantine and privacy loss, by enrolment index."""
    judged = {line.client: line for line in ledger(state.defence)}
    movement = math.fsum(line.movement for line in judged.values())
    found = {}
    for client in sorted(judged.keys() | state.quarantined | state.releases.keys()):
        line, releases = judged.get(client), state.releases.get(client, 0)
        noised = machine.releases
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
