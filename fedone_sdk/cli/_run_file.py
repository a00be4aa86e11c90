"""RUN.yaml: the spec, and the objects that it describes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from fedone_sdk.cli._failures import naming
from fedone_sdk.errors import ArgumentError
from fedone_sdk.spec import BackendSpec, OwnMethodSpec, RunSpec, load_backend, validate_spec

if TYPE_CHECKING:
    from fedone_sdk.backends import LLMBackend
    from fedone_sdk.budget import Budget, BudgetGuard
    from fedone_sdk.local import Federation


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFile:
    """A run and the file that it came from."""

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
        raised: Mapping[str, Any] | None = None,
        start: Sequence[Mapping[str, float]] | None = None,
    ) -> Self:
        """Read a RUN.yaml; arguments that are not None override the file.

        Raises:
            SpecError: One line per mistake, in the file or in the arguments.
        """
        spec = RunSpec.load(path)
        # Keys that are not set in the file remain unset (`RunSpec.is_same_run`).
        given: dict[str, Any] = spec.model_dump(exclude_unset=True)
        if seed is not None:
            given["seed"] = seed
        if cap is not None:
            given["budget"] = {**(given.get("budget") or {}), "queries": cap}
        if raised:
            given["budget"] = {**(given.get("budget") or {}), **raised}
        if exchange is not None:
            given["participation"] = {**given.get("participation", {}), "exchange": exchange}
        if start is not None:
            given["prompt"]["start"] = start
        changed = validate_spec(RunSpec, given, source="arguments")
        if raised and changed.budget is not None:
            _check_raised(spec.budget, changed.budget)
        if isinstance(changed.method, OwnMethodSpec):
            from fedone_sdk.algorithms import load_method

            with naming(str(path)):
                load_method(changed.method, path.parent)
        return cls(path=path, spec=changed)

    @property
    def folder(self) -> Path:
        """Base of the file's relative paths."""
        return self.path.parent

    def federation(self) -> Federation:
        """Return the run with its data."""
        from fedone_sdk.local import Federation

        with naming(str(self.path)):
            return Federation.load(self.spec, self.folder)

    def backend(self, *, cache: Path | None = None, guard: BudgetGuard | None = None) -> LLMBackend:
        """Return the model's client.

        Args:
            cache: File of its answers, unless the run has one.
            guard: A budget that is charged in addition to each query's payer.
        """
        from fedone_sdk.backends.build import build_backend

        spec = self.spec.backend
        if cache is not None and spec.cache is None:
            spec = spec.model_copy(update={"cache": str(cache.absolute())})
        with naming(str(self.path)):
            return build_backend(spec, self.folder, guard=guard)


def backend_of(path: Path | None) -> LLMBackend:
    """Return the model of a file: a RUN.yaml, or its backend section; None is the embedded one."""
    from fedone_sdk.backends.build import build_backend

    with naming("arguments" if path is None else str(path)):
        spec = BackendSpec() if path is None else load_backend(path)
        return build_backend(spec, Path() if path is None else path.parent)


def _check_raised(caps: Budget | None, higher: Budget) -> None:
    try:
        if caps is None:
            raise ValueError("the run has no caps")
        caps.raised(higher)
    except ValueError as exc:
        raise ArgumentError(f"--raise: {exc}") from exc
