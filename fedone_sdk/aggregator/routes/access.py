"""Routes for enrolment tokens, clients and credentials."""

from __future__ import annotations

from dataclasses import asdict

from aiohttp import web

from fedone_sdk.aggregator.http.requests import answer
from fedone_sdk.aggregator.routes.context import SERVICE, message_of, person_of
from fedone_sdk.aggregator.routes.route import RouteTable
from fedone_sdk.errors import ProblemError
from fedone_sdk.messages import (
    ClientInfo,
    ClientList,
    CreatedToken,
    Me,
    NewToken,
    TokenInfo,
    TokenList,
)
from fedone_sdk.stores import ClientRecord, TokenRecord

route = RouteTable("access")

_PAGE = 1000
"""Maximal number of clients per page."""


@route("GET /v1/me", "viewer", Me)
async def me(request: web.Request) -> web.Response:
    """Return the name, role and runs of the caller's token."""
    person = person_of(request)
    return answer(Me(name=person.name, role=person.role, runs=person.runs))


@route(
    "POST /v1/enrolment-tokens",
    "admin",
    {201: CreatedToken},
    request=NewToken,
    problems=("token_conflict",),
)
async def create_token(request: web.Request) -> web.Response:
    """Create an enrolment token.

    The response contains its secret, of which the server only stores a digest.
    """
    message = await message_of(request, NewToken.model_validate)
    record, secret = await request.app[SERVICE].access.create_token(message)
    return answer(CreatedToken.model_validate({**_facts(record), "token": secret}), status=201)


@route("GET /v1/enrolment-tokens", "admin", TokenList)
async def tokens(request: web.Request) -> web.Response:
    """List all enrolment tokens, including expired and revoked ones, without their secrets."""
    found = await request.app[SERVICE].access.tokens()
    return answer(TokenList(tokens=tuple(map(_shown, found))))


@route("DELETE /v1/enrolment-tokens/{token_name}", "admin", TokenInfo)
async def revoke_token(request: web.Request) -> web.Response:
    """Revoke an enrolment token permanently. Devices that enrolled with it stay."""
    name = request.match_info["token_name"]
    token = await request.app[SERVICE].access.revoke_token(name)
    return answer(_shown(token))


@route(
    "GET /v1/clients",
    "admin",
    ClientList,
    query={
        "limit": {"type": "integer", "minimum": 1, "maximum": 2**31 - 1, "default": _PAGE},
        "after": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1},
    },
)
async def clients(request: web.Request) -> web.Response:
    """List the enrolled clients in pages, including revoked ones, without their secrets.

    `limit` sets the page size, at most 1000. `next` in the response is the `after` of the next
    page, or null on the last one.
    """
    after, limit = _number(request, "after", 0, -1), _number(request, "limit", 1, _PAGE)
    limit = min(limit, _PAGE)
    found = await request.app[SERVICE].access.clients(after, limit + 1)
    page = found[:limit]
    last = page[-1].index if len(page) < len(found) else None
    return answer(ClientList(clients=tuple(map(_info, page)), next=last))


def _number(request: web.Request, name: str, least: int, default: int) -> int:
    given = request.query.get(name)
    if given is None:
        return default
    plain = given.isascii() and given.isdigit() and len(given) < 11
    if not (plain and least <= int(given) < 2**31):
        raise ProblemError("invalid_message", f"{name}: must be a number from {least}")
    return int(given)


@route("POST /v1/clients/{client_id}/revoke", "admin", ClientInfo)
async def revoke_client(request: web.Request) -> web.Response:
    """Revoke a client permanently. Its open work passes to other clients."""
    access = request.app[SERVICE].access
    return answer(_info(await access.revoke_client(request.match_info["client_id"])))


def _facts(token: TokenRecord) -> dict[str, object]:
    facts = asdict(token)
    del facts["token_sha256"]
    return facts


def _shown(token: TokenRecord) -> TokenInfo:
    return TokenInfo.model_validate(_facts(token))


def _info(client: ClientRecord) -> ClientInfo:
    return ClientInfo(
        client_id=client.client_id,
        name=client.name,
        token=client.token,
        runs=client.runs,
        enrolled_at=client.enrolled_at,
        revoked_at=client.revoked_at,
        seen_at=client.seen_at,
    )
