"""`fedone tokens`: enrolment tokens of devices."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from fedone_sdk.cli._options import JsonFile, Server, Token, call, group
from fedone_sdk.cli._output import Output, moment
from fedone_sdk.client import AdminClient
from fedone_sdk.errors import ArgumentError
from fedone_sdk.messages import NewToken, TokenInfo
from fedone_sdk.spec import validate_spec

app = group(
    "Create and revoke enrolment tokens of devices.",
    example="fedone tokens create fleet --run 'acme-*' --server https://fedone.example",
)

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}

Name = Annotated[str, typer.Argument(metavar="NAME")]


@app.command(
    epilog="Example: fedone tokens create one-phone --uses 1 --expires-in 7d "
    "--server https://fedone.example"
)
def create(
    name: Name,
    server: Server,
    token: Token,
    run: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="A run that its devices may see; * matches any text; repeatable. Default: all.",
        ),
    ] = None,
    uses: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Maximum number of devices that enrol with it."),
    ] = None,
    expires_in: Annotated[
        str | None, typer.Option(metavar="TIME", help="Its lifetime: 90m, 12h, 30d.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Create a token, and print its secret, which cannot be shown again."""
    output = Output(json_file)
    asked = {
        "name": name,
        "runs": tuple(run) if run else None,
        "uses": uses,
        "expires_in_s": _seconds(expires_in),
    }
    message = validate_spec(NewToken, asked, source="arguments")
    made = call(server, token, lambda admin: admin.create_token(message))
    try:
        output.write_json(made)
    finally:  # no other response contains it
        output.facts({"token": made.token, **_facts(made)})


@app.command("list", epilog="Example: fedone tokens list --server https://fedone.example")
def list_tokens(server: Server, token: Token, json_file: JsonFile = None) -> None:
    """List the tokens, without their secrets."""
    output = Output(json_file)
    found = call(server, token, AdminClient.tokens)
    output.write_json(found)
    output.table(
        ["token", "runs", "uses left", "expires", "revoked"],
        ([one.name, *_facts(one).values()] for one in found),
    )


@app.command(epilog="Example: fedone tokens revoke fleet --server https://fedone.example")
def revoke(name: Name, server: Server, token: Token, json_file: JsonFile = None) -> None:
    """Revoke a token; devices that enrolled with it stay enrolled."""
    output = Output(json_file)
    revoked = call(server, token, lambda admin: admin.revoke_token(name))
    output.write_json(revoked)
    output.facts(_facts(revoked))


def _facts(token: TokenInfo) -> dict[str, str]:
    return {
        "runs": "all" if token.runs is None else " ".join(token.runs),
        "uses left": "any" if token.uses_left is None else str(token.uses_left),
        "expires": "never" if token.expires_at is None else moment(token.expires_at),
        "revoked": "no" if token.revoked_at is None else moment(token.revoked_at),
    }


def _seconds(text: str | None) -> float | None:
    if text is None:
        return None
    found = re.fullmatch(r"([0-9]{1,9})([smhd])", text)
    if found is None:
        raise ArgumentError(
            f"--expires-in: must be a number with s, m, h or d, such as 30d (got {text!r})"
        )
    return float(int(found[1]) * _SECONDS[found[2]])
