"""`fedone tokens` and `fedone clients`: enrolment tokens, and enrolled devices."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from fedone_sdk.cli._options import JsonFile, Server, Token, call, command, group
from fedone_sdk.cli._output import Output, moment
from fedone_sdk.client import AdminClient
from fedone_sdk.errors import ArgumentError
from fedone_sdk.messages import ClientInfo, NewToken, TokenInfo
from fedone_sdk.spec import validate_spec

tokens = group(
    "Create and revoke enrolment tokens of devices.",
    example="fedone tokens create fleet --run 'acme-*' --server https://fedone.example",
)

clients = group(
    "List enrolled devices, and revoke them.",
    example="fedone clients list --server https://fedone.example",
)

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}

Name = Annotated[str, typer.Argument(metavar="NAME")]


@command(tokens)
def create(
    name: Name,
    server: Server,
    token: Token,
    run: list[str] | None = None,
    uses: Annotated[int | None, typer.Option(min=1)] = None,
    expires_in: str | None = None,
    json_file: JsonFile = None,
) -> None:
    """Create a token, and print its secret, which cannot be shown again.

    Example: fedone tokens create one-phone --uses 1 --expires-in 7d --server https://fedone.example

    Args:
        run (PATTERN): Ids of runs that devices with this token may see; * matches any text;
            repeatable. Default: all runs.
        uses (N): Maximum number of devices that may enrol with the token. Default: no limit.
        expires_in (TIME): Lifetime of the token: 90m, 12h, 30d.
    """
    output = Output(json_file)
    options = {
        "name": name,
        "runs": tuple(run) if run else None,
        "uses": uses,
        "expires_in_s": _seconds(expires_in),
    }
    message = validate_spec(NewToken, options, source="arguments")
    created = call(server, token, AdminClient.create_token, message)
    try:
        output.write_json(created)
    finally:  # Print the secret even if the file was not written: no call returns it again.
        output.facts({"token": created.token, **_token_facts(created)})
    if uses is None:
        typer.echo("warning: without --uses, a leaked token enrols any number of devices", err=True)


@command(tokens, "list")
def list_tokens(server: Server, token: Token, json_file: JsonFile = None) -> None:
    """List the tokens, without their secrets.

    Example: fedone tokens list --server https://fedone.example
    """
    output = Output(json_file)
    listed = output.write_json(call(server, token, AdminClient.tokens))
    output.table(
        ["token", "runs", "uses left", "expires", "revoked"],
        ([one.name, *_token_facts(one).values()] for one in listed),
    )


@command(tokens, "revoke")
def revoke_token(name: Name, server: Server, token: Token, json_file: JsonFile = None) -> None:
    """Revoke a token; devices that enrolled with it stay enrolled.

    Example: fedone tokens revoke fleet --server https://fedone.example
    """
    output = Output(json_file)
    revoked = output.write_json(call(server, token, AdminClient.revoke_token, name))
    output.facts(_token_facts(revoked))


@command(clients, "list")
def list_clients(server: Server, token: Token, json_file: JsonFile = None) -> None:
    """List the enrolled clients.

    Example: fedone clients list --server https://fedone.example
    """
    output = Output(json_file)
    listed = output.write_json(call(server, token, AdminClient.clients))
    output.table(
        ["client", "name", "token", "runs", "enrolled", "revoked"],
        ([client.client_id, *_client_facts(client).values()] for client in listed),
    )


@command(clients, "revoke")
def revoke_client(
    client_id: Annotated[str, typer.Argument(metavar="CLIENT_ID")],
    server: Server,
    token: Token,
    json_file: JsonFile = None,
) -> None:
    """Revoke a client permanently.

    Example: fedone clients revoke client-4f1d2c3b5a69 --server https://fedone.example
    """
    output = Output(json_file)
    revoked = output.write_json(call(server, token, AdminClient.revoke_client, client_id))
    output.facts(_client_facts(revoked))


def _token_facts(token: TokenInfo) -> dict[str, str]:
    return {
        "runs": "all" if token.runs is None else " ".join(token.runs),
        "uses left": "unlimited" if token.uses_left is None else str(token.uses_left),
        "expires": "never" if token.expires_at is None else moment(token.expires_at),
        "revoked": "no" if token.revoked_at is None else moment(token.revoked_at),
    }


def _client_facts(client: ClientInfo) -> dict[str, str]:
    return {
        "name": client.name or "-",
        "token": client.token or "-",
        "runs": "all" if client.runs is None else " ".join(client.runs),
        "enrolled": moment(client.enrolled_at),
        "revoked": "no" if client.revoked_at is None else moment(client.revoked_at),
    }


def _seconds(text: str | None) -> float | None:
    if text is None:
        return None
    match = re.fullmatch(r"([0-9]{1,9})([smhd])", text)
    if match is None:
        raise ArgumentError(
            f"--expires-in: must be a number with s, m, h or d, such as 30d (got {text!r})"
        )
    return float(int(match[1]) * _SECONDS[match[2]])
