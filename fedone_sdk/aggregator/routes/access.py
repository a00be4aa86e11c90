"""What admins call to let devices in and to shut them out; and how a device renews its secret."""

from __future__ import annotations

from dataclasses import asdict

from aiohttp import web

from fedone_sdk.aggregator.http import answer, bearer_token
from fedone_sdk.aggregator.routes.exchange import SERVICE, client_of, message_of
from fedone_sdk.aggregator.routes.route import Route
from fedone_sdk.messages import (
    ClientInfo,
    ClientList,
    CreatedToken,
    NewToken,
    Rotated,
    TokenInfo,
    TokenList,
)
from fedone_sdk.stores import ClientRecord, TokenRecord

__all__ = ["ACCESS"]


async def create_token(request: web.Request) -> web.Response:
    """Makes a token for devices to enrol with.

    Its secret is told once; the server keeps its digest only.
    """
    message, _ = await message_of(request, NewToken.model_validate_json)
    record, secret = await request.app[SERVICE].access.create_token(message)
    return answer(CreatedToken.model_validate({**_facts(record), "token": secret}), status=201)


async def tokens(request: web.Request) -> web.Response:
    """All enrolment tokens, also those that do not work any more, without their secrets."""
    found = await request.app[SERVICE].access.tokens()
    return answer(TokenList(tokens=tuple(map(_shown, found))))


async def revoke_token(request: web.Request) -> web.Response:
    """Ends an enrolment token for good. Devices that came with it stay."""
    name = request.match_info["token_name"]
    token = await request.app[SERVICE].access.revoke_token(name)
    return answer(_shown(token))


async def clients(request: web.Request) -> web.Response:
    """All enrolled clients, also revoked ones, without their secrets."""
    found = await request.app[SERVICE].access.clients()
    return answer(ClientList(clients=tuple(map(_info, found))))


async def revoke_client(request: web.Request) -> web.Response:
    """Ends a client's credential for good, at once. Work that it holds is given to others."""
    access = request.app[SERVICE].access
    return answer(_info(await access.revoke_client(request.match_info["client_id"])))


async def rotate(request: web.Request) -> web.Response:
    """Gives a device a new credential.

    The one that it asks with stays valid until the new one is used, so that a lost answer locks
    nobody out: ask again.
    """
    client, access = client_of(request), request.app[SERVICE].access
    return answer(await access.rotate(client, bearer_token(request)))


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
        signs=client.public_key is not None,
        enrolled_at=client.enrolled_at,
        revoked_at=client.revoked_at,
    )


ACCESS = (
    Route(
        method="POST",
        path="/v1/enrolment-tokens",
        handler=create_token,
        access="admin",
        tag="access",
        summary="Make an enrolment token",
        request=NewToken,
        answers={201: CreatedToken},
        problems=("token_conflict",),
    ),
    Route(
        method="GET",
        path="/v1/enrolment-tokens",
        handler=tokens,
        access="admin",
        tag="access",
        summary="List enrolment tokens",
        answers={200: TokenList},
    ),
    Route(
        method="DELETE",
        path="/v1/enrolment-tokens/{token_name}",
        handler=revoke_token,
        access="admin",
        tag="access",
        summary="Revoke an enrolment token",
        answers={200: TokenInfo},
    ),
    Route(
        method="GET",
        path="/v1/clients",
        handler=clients,
        access="admin",
        tag="access",
        summary="List clients",
        answers={200: ClientList},
    ),
    Route(
        method="POST",
        path="/v1/clients/{client_id}/revoke",
        handler=revoke_client,
        access="admin",
        tag="access",
        summary="Revoke a client",
        answers={200: ClientInfo},
    ),
    Route(
        method="POST",
        path="/v1/clients/me/credential",
        handler=rotate,
        access="device",
        tag="access",
        summary="Renew a device's credential",
        answers={200: Rotated},
    ),
)
