"""The command tree. Commands import their dependencies when they run, so that `--help` is fast."""

from __future__ import annotations

from typing import Annotated

import typer

from fedone_sdk import __version__
from fedone_sdk.cli import (
    access,
    client,
    compare,
    db,
    init,
    models,
    prompt,
    report,
    retune,
    runs,
    serve,
    start,
    tune,
)

# Plain help and errors, equal in a terminal, a pipe and a log.
app = typer.Typer(
    help="Federated tuning of short prompts for black-box language models.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    pretty_exceptions_show_locals=False,
)


def _print_version(asked: bool) -> None:
    if asked:
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


app.command(epilog="Example: fedone quickstart --json result.json")(start.quickstart)
app.command(epilog="Example: fedone init tickets.csv --model smollm2-135m-instruct")(init.init)
app.command(epilog="Example: fedone tune run.yaml --cap 500 --report run.html")(tune.tune)
app.command(epilog="Example: fedone plan run.yaml")(tune.plan)
app.command(
    epilog="Example: fedone retune sst2.prompt.json --backend new.yaml --run run.yaml --cap 200"
)(retune.retune)
app.command(epilog="Example: fedone compare run.yaml --seeds 5 --html compare.html")(
    compare.compare
)
app.command(epilog='Example: fedone score run.yaml --prompt " Overall verdict"')(prompt.score)
app.command(epilog="Example: fedone report sst2 --store fedone.db -o sst2.html")(report.report)
app.command(epilog="Example: fedone serve config.yaml")(serve.serve)
app.command(
    epilog="Example: FEDONE_TOKEN=... fedone client --server https://fedone.example "
    "--data reviews.jsonl --state ~/.fedone"
)(client.client)
app.command(epilog="Example: fedone models smollm2-135m-instruct")(models.models)
app.add_typer(prompt.app, name="prompt")
app.add_typer(runs.app, name="runs")
app.add_typer(access.tokens, name="tokens")
app.add_typer(access.clients, name="clients")
app.command(epilog="Example: fedone budget spent.db --release-dead")(db.budget)
app.add_typer(db.app, name="db")
