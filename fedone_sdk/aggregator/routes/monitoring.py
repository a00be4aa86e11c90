"""Routes for monitoring: the caller's token, seats, token probabilities."""

from __future__ import annotations

import numpy as np
from aiohttp import web
from numpy.typing import NDArray

from fedone_sdk.aggregator.http.requests import answer
from fedone_sdk.aggregator.routes.context import CONTEXT, SERVICE, run_of
from fedone_sdk.aggregator.routes.route import Route
from fedone_sdk.aggregator.runtime import in_thread
from fedone_sdk.errors import ProblemError
from fedone_sdk.messages import (
    Me,
    PositionProbabilities,
    Seats,
    TokenProbabilities,
    TokenProbability,
)
from fedone_sdk.vocabulary import Vocabulary

_MOST_TOKENS = 32
_TOKENS = 8


async def me(request: web.Request) -> web.Response:
    """Return the name, role and runs of the caller's token."""
    person = CONTEXT.get().person
    if person is None:
        raise LookupError(f"{request.path} is not restricted to users")
    return answer(Me(name=person.name, role=person.role, runs=person.runs))


async def seats(request: web.Request) -> web.Response:
    """Return the seats of the current round, the waiting clients, and the newest lost work."""
    run = await run_of(request)
    busy = {seat.client for seat in run.state.seats if seat.phase != "done"}
    waiting = request.app[SERVICE].dispatcher.available(run).keys() - busy
    return answer(
        Seats(
            round=run.state.round,
            waiting=len(waiting),
            seats=await run.seats(),
            lost=tuple(run.lost),
        )
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


MONITORING_ROUTES = (
    Route("GET /v1/me", me, access="viewer", tag="access", answers={200: Me}),
    Route("GET /v1/runs/{run_id}/seats", seats, access="viewer", tag="runs", answers={200: Seats}),
    Route(
        "GET /v1/runs/{run_id}/probabilities",
        probabilities,
        access="viewer",
        tag="runs",
        answers={200: TokenProbabilities},
        problems=("invalid_message",),
        query={"top": {"type": "integer", "minimum": 1, "maximum": _MOST_TOKENS}},
    ),
)
