"""Options that commands share, help texts (from docstrings), and calls to a server."""

from __future__ import annotations

import asyncio
import copy
import inspect
import re
import typing
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Concatenate, ParamSpec, TypeVar

import typer

from fedone_sdk.budget import Budget
from fedone_sdk.client import AdminClient
from fedone_sdk.errors import ArgumentError
from fedone_sdk.spec import validate_spec
from fedone_sdk.trackers import Tracking, find_tracker

P = ParamSpec("P")
T = TypeVar("T")
Function = TypeVar("Function", bound=Callable[..., None])


def secret(context: typer.Context, option: typer.CallbackParam, token: str | None) -> str | None:
    """Check that a token comes from an environment variable, and return it."""
    source = context.get_parameter_source(option.name or "")
    if source is not None and source.name == "COMMANDLINE":
        raise ArgumentError(
            f"{option.opts[0]}: other users of this machine can see options; set {option.envvar}"
        )
    return token


_SERVER = typer.Option(metavar="URL", help="The aggregator's URL.")
_TOKEN = typer.Option(
    "--admin-token",
    metavar="",
    envvar="FEDONE_ADMIN_TOKEN",
    callback=secret,
    help="The server's admin token. Only the variable FEDONE_ADMIN_TOKEN can set it.",
)

RunPath = Annotated[Path, typer.Argument(metavar="RUN.yaml", help="The run's description.")]
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
        help="The run's store: a SQLite file, or postgresql://USER@HOST/DATABASE. Default: the "
        "store that `fedone tune` wrote to .fedone in this folder.",
    ),
]
OwnRun = Annotated[
    Path | None,
    typer.Option(
        "--run",
        metavar="RUN.yaml",
        help="The run's RUN.yaml. A custom method needs it, because a store contains no code.",
    ),
]
BackendFile = Annotated[
    Path | None,
    typer.Option(
        "--backend",
        metavar="FILE",
        help="The model: a RUN.yaml, or a file with a `backend` section.",
    ),
]
JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="FILE",
        help="Write the result to this file as JSON; - is standard output.",
        allow_dash=True,
    ),
]
Seed = Annotated[int | None, typer.Option(metavar="N", help="Replace the run's random seed.")]
Cap = Annotated[
    int | None, typer.Option(metavar="N", help="Spend no more than N training queries.")
]
Raised = Annotated[
    list[str] | None,
    typer.Option(
        "--raise",
        metavar="UNIT=N",
        help="Raise a cap of the run and continue the run: queries=600, usd=5; repeatable.",
    ),
]
Trackers = Annotated[
    list[str] | None,
    typer.Option(
        "--tracker",
        metavar="NAME",
        help="Report the run to mlflow, tensorboard, wandb or a custom tracker; repeatable.",
    ),
]


_ARGUMENT = re.compile(r"^    (\w+)(?: \((.+?)\))?: (.+(?:\n {8}.+)*)", re.MULTILINE)
"""A parameter in the section ``Args``: name, placeholder, description."""


def command(app: typer.Typer, name: str | None = None) -> Callable[[Function], Function]:
    """Return a decorator that adds a function to a group as a command.

    The function's docstring is the command's help. Its section ``Args:`` has the help of each
    parameter, and in parentheses the placeholder of its value. Shared options are not listed there.
    """

    def add(function: Function) -> Function:
        text, _, arguments = inspect.cleandoc(function.__doc__ or "").partition("\n\nArgs:\n")
        about, example = text.split("\n\nExample: ")
        hints = typing.get_type_hints(function, include_extras=True)
        parameters = inspect.signature(function).parameters
        for parameter, placeholder, description in _ARGUMENT.findall(arguments):
            info, kind = _parameter(parameters[parameter], hints[parameter])
            info.help, info.metavar = " ".join(description.split()), placeholder or None
            hints[parameter] = Annotated[kind, info]
        function.__annotations__ = hints
        example = " ".join(example.split())
        return app.command(name, help=about, epilog=f"Example: {example}")(function)

    return add


def _parameter(parameter: inspect.Parameter, hint: Any) -> tuple[Any, Any]:
    """Return typer's object for a parameter, and its type; a flag gets no ``--no-...`` form."""
    if typing.get_origin(hint) is Annotated:
        kind, info = typing.get_args(hint)
        return copy.copy(info), kind
    if parameter.default is inspect.Parameter.empty:
        return typer.Argument(), hint
    names = [f"--{parameter.name.replace('_', '-')}"] if hint is bool else []
    return typer.Option(*names), hint


def group(about: str, *, example: str) -> typer.Typer:
    """Return a group of commands that prints its help if no command is given."""
    return typer.Typer(
        help=about, no_args_is_help=True, rich_markup_mode=None, epilog=f"Example: {example}"
    )


def tracking_of(names: Sequence[str] | None) -> Tracking:
    """Return the trackers with these names."""
    return Tracking({name: find_tracker(name) for name in names or ()})


def caps_of(option: str, texts: Sequence[str] | None) -> Budget | None:
    """Return the caps in the values of an option, such as ``queries=600`` and ``usd=5``."""
    if not texts:
        return None
    pairs = [text.partition("=") for text in texts]
    for unit, mark, _ in pairs:
        if not (unit and mark):
            raise ArgumentError(f"{option}: {unit!r} must be UNIT=N, such as queries=600")
    return validate_spec(Budget, {unit: cap for unit, _, cap in pairs}, source=option)


def call(
    server: str,
    token: str,
    method: Callable[Concatenate[AdminClient, P], Awaitable[T]],
    *args: P.args,
    **kwargs: P.kwargs,
) -> T:
    """Call a method of a server's `AdminClient`, and return its result."""

    async def answer() -> T:
        async with AdminClient(server, token) as admin:
            return await method(admin, *args, **kwargs)

    return asyncio.run(answer())
