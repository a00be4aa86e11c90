"""Routes for monitoring: the caller's token, seats, token probabilities."""

from __future__ import annotations

from aiohttp import web

from fedone_sdk.aggregator.http.requests import answer
from fedone_sdk.aggregator.routes.context import CONTEXT, SERVICE, run_of
from fedone_sdk.aggregator.routes.route import Route
from fedone_sdk.aggregator.runtime import in_thread
from fedone_sdk.aggregator.serving.probabilities import likeliest
from fedone_sdk.errors import ProblemError
from fedone_sdk.messages import Me, Seats, TokenProbabilities

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


MONITORING_ROUTES = (
    Route(
        method="GET",
        path="/v1/me",
        handler=me,
        access="viewer",
        tag="access",
        summary="Get the caller's token",
        answers={200: Me},
    ),
    Route(
        method="GET",
        path="/v1/runs/{run_id}/seats",
        handler=seats,
        access="viewer",
        tag="runs",
        summary="Get the seats of a run",
        answers={200: Seats},
    ),
    Route(
        method="GET",
        path="/v1/runs/{run_id}/probabilities",
        handler=probabilities,
        access="viewer",
        tag="runs",
        summary="Get the most probable tokens of each position",
        answers={200: TokenProbabilities},
        problems=("invalid_message",),
        query={"top": {"type": "integer", "minimum": 1, "maximum": _MOST_TOKENS}},
    ),
)
