"""The subcommands of `fedone`. Slow imports wait until a command runs, so `--help` is fast."""

from __future__ import annotations

from typing import Annotated

import typer

from fedone_sdk import __version__
from fedone_sdk.cli import (
    access,
    client,
    compare,
    init,
    models,
    prompts,
    report,
    retune,
    runs,
    serve,
    tune,
)
from fedone_sdk.cli._options import command

# Help and errors are plain text: the same in a terminal, in a pipe and in a log.
app = typer.Typer(
    help="Federated tuning of short prompts for black-box language models.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    pretty_exceptions_show_locals=False,
)


def _print_version(is_given: bool) -> None:
    if is_given:
        typer.echo(f"fedone {__version__}")
        raise typer.Exit


@app.callback(epilog="Example: fedone quickstart")
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    pass


for function in (
    *(tune.quickstart, init.init, tune.tune, tune.plan, retune.retune, compare.compare),
    *(prompts.score, report.report, serve.serve, client.client, models.models),
):
    command(app)(function)
for name, group in {
    "prompt": prompts.app,
    "runs": runs.app,
    "tokens": access.tokens,
    "clients": access.clients,
    "db": serve.db,
}.items():
    app.add_typer(group, name=name)
