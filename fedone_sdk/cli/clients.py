"""`fedone clients`: enrolled devices."""

from __future__ import annotations

from typing import Annotated

import typer

from fedone_sdk.cli._options import JsonFile, Server, Token, call, group
from fedone_sdk.cli._output import Output, moment
from fedone_sdk.client import AdminClient
from fedone_sdk.messages import ClientInfo

app = group(
    "List enrolled devices, and revoke them.",
    example="fedone clients list --server https://fedone.example",
)


@app.command("list", epilog="Example: fedone clients list --server https://fedone.example")
def list_clients(server: Server, token: Token, json_file: JsonFile = None) -> None:
    """List the clients."""
    output = Output(json_file)
    found = call(server, token, AdminClient.clients)
    output.write_json(found)
    output.table(
        ["client", "name", "token", "runs", "enrolled", "revoked"],
        ([client.client_id, *_facts(client).values()] for client in found),
    )


@app.command(
    epilog="Example: fedone clients revoke client-4f1d2c3b5a69 --server https://fedone.example"
)
def revoke(
    client_id: Annotated[str, typer.Argument(metavar="CLIENT_ID")],
    server: Server,
    token: Token,
    json_file: JsonFile = None,
) -> None:
    """Revoke a client permanently."""
    output = Output(json_file)
    revoked = call(server, token, lambda admin: admin.revoke_client(client_id))
    output.write_json(revoked)
    output.facts(_facts(revoked))


def _facts(client: ClientInfo) -> dict[str, str]:
    return {
        "name": client.name or "-",
        "token": client.token or "-",
        "runs": "all" if client.runs is None else " ".join(client.runs),
        "enrolled": moment(client.enrolled_at),
        "revoked": "no" if client.revoked_at is None else moment(client.revoked_at),
    }
