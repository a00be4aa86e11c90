"""Options, groups and calls of a server that several commands share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from fedone_sdk.client import AdminClient
from fedone_sdk.errors import ArgumentError
from fedone_sdk.messages import is_sendable

if TYPE_CHECKING:
    from fedone_sdk.trackers import Tracking

T = TypeVar("T")


def header_value(option: typer.CallbackParam, token: str | None) -> str | None:
    """Strip a token for a header."""
    found = None if token is None else token.strip()
    if found and not is_sendable(found):
        raise ArgumentError(
            f"{option.opts[0]}: holds characters that no token has; allowed is printable ASCII"
        )
    return found


_SERVER = typer.Option(metavar="URL", help="The aggregator.")
_TOKEN = typer.Option(
    "--admin-token",
    metavar="T",
    envvar="FEDONE_ADMIN_TOKEN",
    callback=header_value,
    help="The server's admin token.",
)
STORE = "A store: a SQLite file, or postgresql://USER@HOST/DATABASE."

RunPath = Annotated[Path, typer.Argument(metavar="RUN.yaml", help="The run.")]
RunId = Annotated[str, typer.Argument(metavar="RUN_ID")]
Server = Annotated[str, _SERVER]
Token = Annotated[str, _TOKEN]
OptionalServer = Annotated[str | None, _SERVER]
OptionalToken = Annotated[str | None, _TOKEN]
RunStore = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="STORE",
        help=f"{STORE} By default the store of `fedone tune` in this folder's .fedone.",
    ),
]
SchemaStore = Annotated[str | None, typer.Option("--store", metavar="URL", help=STORE)]
OwnRun = Annotated[
    Path | None,
    typer.Option(
        "--run",
        metavar="RUN.yaml",
        help="The run's file, if it names a method of your own: what is stored loads no code.",
    ),
]
BackendFile = Annotated[
    Path | None,
    typer.Option(
        "--backend",
        metavar="FILE",
        help="The model: a RUN.yaml, or a file with its `backend` section.",
    ),
]
JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="FILE",
        help="Write the result as JSON; - is standard output.",
        allow_dash=True,
    ),
]
Seed = Annotated[int | None, typer.Option(metavar="N", help="Use this seed.")]
Cap = Annotated[
    int | None, typer.Option(metavar="N", help="Spend no more than N training queries.")
]
Trackers = Annotated[
    list[str] | None,
    typer.Option(
        "--tracker",
        metavar="NAME",
        help="Report the run to mlflow, tensorboard, wandb or a custom tracker; repeatable.",
    ),
]


def group(about: str, *, example: str) -> typer.Typer:
    """Return a group of commands that prints its help if no command is given."""
    return typer.Typer(
        help=about, no_args_is_help=True, rich_markup_mode=None, epilog=f"Example: {example}"
    )


def tracking_of(names: Sequence[str] | None) -> Tracking:
    """Load trackers by their names."""
    from fedone_sdk.trackers import Tracking, find_tracker

    return Tracking({name: find_tracker(name) for name in names or ()})


def call(server: str, token: str, use: Callable[[AdminClient], Awaitable[T]]) -> T:
    """Return what `use` does with a client of the server."""

    async def used() -> T:
        async with AdminClient(server, token) as admin:
            return await use(admin)

    return asyncio.run(used())
