"""Options and calls of commands that manage a server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

import typer

from fedone_sdk.cli._options import header_value
from fedone_sdk.client import AdminClient

T = TypeVar("T")

Server = Annotated[str, typer.Option(metavar="URL", help="The aggregator.")]
Token = Annotated[
    str,
    typer.Option(
        "--admin-token",
        metavar="T",
        envvar="FEDONE_ADMIN_TOKEN",
        callback=header_value,
        help="The server's admin token.",
    ),
]


def call(server: str, token: str, use: Callable[[AdminClient], Awaitable[T]]) -> T:
    """Return what `use` does with a client of the server.

    Raises:
        FedOneError: The errors of `AdminClient`.
    """

    async def used() -> T:
        async with AdminClient(server, token) as admin:
            return await use(admin)

    return asyncio.run(used())
