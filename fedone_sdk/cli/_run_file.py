"""RUN.yaml as the commands use it: the spec, and the objects that it describes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from fedone_sdk.cli._failures import naming
from fedone_sdk.errors import SpecError
from fedone_sdk.spec import OnnxSpec, RunSpec, validate_spec

if TYPE_CHECKING:
    from fedone_sdk.backends import LLMBackend
    from fedone_sdk.simulation import Federation

__all__ = ["RunFile", "build_backend"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFile:
    """A run and the file that it came from.

    Attributes:
        path: The file, as the user wrote it.
        spec: The run.
    """

    path: Path
    spec: RunSpec

    @classmethod
    def load(
        cls,
        path: Path,
        *,
        seed: int | None = None,
        cap: int | None = None,
        exchange: str | None = None,
    ) -> Self:
        """Reads a RUN.yaml; what is not None replaces what the file says.

        Raises:
            SpecError: One line per mistake, in the file or in the arguments.
        """
        spec = RunSpec.load(path)
        given: dict[str, Any] = spec.model_dump()
        if seed is not None:
            given["seed"] = seed
        if cap is not None:
            given["budget"] = {**(given["budget"] or {}), "queries": cap}
        if exchange is not None:
            given["participation"]["exchange"] = exchange
        return cls(path=path, spec=validate_spec(RunSpec, given, source="arguments"))

    @property
    def folder(self) -> Path:
        """Where the file's relative paths start."""
        return self.path.parent

    def federation(self) -> Federation:
        """The run with its data in place."""
        from fedone_sdk.simulation import Federation

        with naming(str(self.path)):
            return Federation.load(self.spec, self.folder)

    def backend(self) -> LLMBackend:
        """The model, behind a cache."""
        return build_backend(self.spec.backend, self.folder, source=str(self.path))


def build_backend(spec: OnnxSpec, folder: Path, *, source: str) -> LLMBackend:
    """A backend behind a cache.

    Args:
        spec: Which.
        folder: Where a relative path starts.
        source: The file that says so.

    Raises:
        SpecError: There is no such model.
    """
    from fedone_sdk.backends import CachedBackend, OnnxBackend

    model = None if spec.model is None else folder / Path(spec.model).expanduser()
    try:
        return CachedBackend(OnnxBackend(model, threads=spec.threads))
    except SpecError as exc:
        raise SpecError(f"backend.model: {exc}", source=source) from exc
