"""Options that several commands share."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from fedone_sdk.errors import SpecError
from fedone_sdk.messages import is_sendable


class ExchangeName(StrEnum):
    """Exchanges between server and client."""

    alpha = "alpha"
    losses = "losses"


class CalibrationName(StrEnum):
    """Methods of estimating a label bias without labels."""

    none = "none"
    contextual = "contextual"
    batch = "batch"


class TransportName(StrEnum):
    """Transports of messages."""

    http = "http"
    memory = "memory"


def header_value(option: typer.CallbackParam, token: str | None) -> str | None:
    """Strips a token for a header.

    Raises:
        SpecError: It cannot be sent. The message does not contain it.
    """
    found = None if token is None else token.strip()
    if found and not is_sendable(found):
        raise SpecError(
            f"{option.opts[0]}: holds characters that no token has; allowed is printable ASCII",
            source="arguments",
        )
    return found


RunPath = Annotated[Path, typer.Argument(metavar="RUN.yaml", help="The run.")]
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
Calibration = Annotated[
    CalibrationName | None,
    typer.Option(
        help="Estimate a label bias without labels: from inputs without content (one more query), "
        "or from all examples. By default as in the run."
    ),
]
Exchange = Annotated[
    ExchangeName | None,
    typer.Option(help="Contents of updates: alpha (as in the paper) or one loss per prompt."),
]
Trackers = Annotated[
    list[str] | None,
    typer.Option(
        "--tracker",
        metavar="NAME",
        help="Report the run to mlflow, tensorboard, wandb or a custom tracker; repeatable.",
    ),
]
Transport = Annotated[
    TransportName, typer.Option(help="HTTP over loopback, or the same messages without sockets.")
]
