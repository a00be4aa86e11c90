"""A RUN.yaml: its spec, federation and backend, and the files in which its run is stored."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from fedone_sdk import aggregator, backends, local, stores
from fedone_sdk.backends.build import build_backend
from fedone_sdk.budget import Budget
from fedone_sdk.cli._process import errors_in
from fedone_sdk.errors import ArgumentError, SpecError
from fedone_sdk.spec import BackendSpec, OwnMethodSpec, RunSpec, load_backend, validate_spec
from fedone_sdk.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFile:
    """A run's spec, and the path of its RUN.yaml."""

    path: Path
    spec: RunSpec

    @classmethod
    def load(
        cls,
        path: Path,
        *,
        seed: int | None = None,
        cap: int | None = None,
        raised: Budget | None = None,
    ) -> Self:
        """Read a RUN.yaml; arguments that are not None override the file."""
        spec = RunSpec.load(path)
        # Keys that are not set stay unset, so that the spec equals the stored spec of the run.
        document: dict[str, Any] = spec.model_dump(exclude_unset=True)
        if seed is not None:
            document["seed"] = seed
        if cap is not None:
            document["budget"] = {**(document.get("budget") or {}), "queries": cap}
        if raised is not None:
            document["budget"] = _raised(spec.budget, raised)
        changed = validate_spec(RunSpec, document, source="arguments")
        if isinstance(changed.method, OwnMethodSpec):
            from fedone_sdk.algorithms import load_method

            with errors_in(str(path)):
                load_method(changed.method, path.parent)
        return cls(path=path, spec=changed)

    @property
    def folder(self) -> Path:
        """The folder to which paths in the file are relative."""
        return self.path.parent

    def federation(self) -> local.Federation:
        """Load the run's data, and return its federation."""
        with errors_in(str(self.path)):
            return local.Federation.load(self.spec, self.folder)

    def backend(self, *, cache: Path | None = None) -> backends.LLMBackend:
        """Return the run's backend; `cache` stores answers, unless RUN.yaml names a cache."""
        spec = self.spec.backend
        if cache is not None and spec.cache is None:
            spec = spec.model_copy(update={"cache": str(cache.absolute())})
        with errors_in(str(self.path)):
            return build_backend(spec, self.folder)


def backend_of(path: Path | None) -> backends.LLMBackend:
    """Return the backend that a file describes; for None, the embedded model."""
    with errors_in("arguments" if path is None else str(path)):
        spec = BackendSpec() if path is None else load_backend(path)
        return build_backend(spec, Path() if path is None else path.parent)


def _raised(caps: Budget | None, higher: Budget) -> Budget:
    try:
        if caps is None:
            raise ValueError("the run has no caps")
        return caps.raised(higher)
    except ValueError as exc:
        raise ArgumentError(f"--raise: {exc}") from exc


FOLDER = ".fedone"
"""Name of the state folder next to a RUN.yaml."""

_FINAL = {"completed", "budget_exhausted"}


def default_store(run_id: str, folder: Path = Path()) -> Path:
    """Return the default store of a run whose RUN.yaml is in this folder."""
    return folder / FOLDER / f"{run_id}.db"


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownRun:
    """A stored run, as it was before this command.

    Attributes:
        ended: The status of a run that has ended; None if this command can continue the run.
        raised: The caps that this command raises, each as ``queries 300 -> 600``.
        cache_hits: Number of answers that the run has read from the cache.
    """

    ended: str | None
    raised: tuple[str, ...]
    round: int
    cache_hits: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Paths of a run's store, its clients' state, and the model's stored answers."""

    store: Path
    clients: Path
    answers: Path

    @classmethod
    def of(cls, run_path: Path, name: str, store: Path | None = None) -> Self:
        """Return the paths next to `store` (the file of ``--store``), or in ``.fedone``."""
        if store is not None:
            return cls(
                store=store,
                clients=store.with_name(f"{store.name}.fedone-clients"),
                answers=store.with_name(f"{store.name}.fedone-answers"),
            )
        folder = run_path.parent / FOLDER
        parent = folder if folder.exists() else run_path.parent
        writable = parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)
        if not run_path.is_file() or not writable:
            raise _unusable(folder)
        return cls(
            store=default_store(name, run_path.parent),
            clients=folder / f"{name}.clients",
            answers=folder / "answers.sqlite",
        )

    def make(self) -> None:
        """Create the folder ``.fedone``, with a .gitignore for all of its files."""
        folder = self.store.parent
        if folder.name != FOLDER:
            return
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            ignore = folder / ".gitignore"
            if not ignore.exists():
                ignore.write_text("*\n", encoding="utf-8")
        except OSError as exc:
            raise _unusable(folder) from exc

    async def find(
        self, spec: RunSpec, vocabulary: Vocabulary, *, fresh: bool, model: str | None = None
    ) -> KnownRun | None:
        """Check that the stored run can continue, and return it; None if no run is stored."""
        if not self.store.exists():
            shutil.rmtree(self.clients, ignore_errors=True)
            return None
        store = stores.SqlStore.sqlite(self.store)
        await store.open()
        try:
            if fresh:
                await self._clear(store, spec.name)
            known = await store.run(spec.name)
            if not await store.tokens():  # New or cleared store: the clients' state is outdated.
                shutil.rmtree(self.clients, ignore_errors=True)
        finally:
            await store.close()
        if known is None:
            return None
        with aggregator.reading(spec.name):
            document = json.loads(known.document)
            raised = self._compare(known, document["account"]["cap"], spec, vocabulary)
            status, before = document["status"], document["model"]
            found = KnownRun(
                ended=status if status in _FINAL and not raised else None,
                raised=raised,
                round=document["round"],
                cache_hits=document["counters"]["cache_hits"],
            )
        if model is not None and before not in (None, model):
            raise SpecError(
                f"backend: is {model!r}, but the run {spec.name!r} in {self.store} was scored by "
                f"{before!r}; start over with --fresh, or rename the file of --backend, from which "
                "the run gets its name"
            )
        return found

    async def _clear(self, store: stores.SqlStore, name: str) -> None:
        others = sorted((await store.versions()).keys() - {name})
        if others:
            raise ArgumentError(
                f"--fresh: {self.store} also has other runs ({', '.join(others)}); "
                "use another --store"
            )
        await store.clear()

    def _compare(
        self, known: stores.RunRecord, cap: Any, spec: RunSpec, vocabulary: Vocabulary
    ) -> tuple[str, ...]:
        """Check that the stored run has this spec; return the caps that are raised."""
        stored = RunSpec.model_validate_json(known.spec)
        # The stored spec has the original caps; `cap` has the current caps, which may be higher.
        caps = None if cap is None else Budget.model_validate(cap)
        stored = stored.model_copy(update={"budget": caps})
        differences = tuple(stored.differences(spec))
        if not stored.is_same_run(spec):
            changed = ", ".join(differences)
            if all(name.startswith("budget.") for name in differences):
                changed += "; a cap can only be raised"
        elif not Vocabulary.parse(known.candidates).comes_from(vocabulary):
            changed = "the candidates, which depend on the section prompt and on the data"
        else:
            return tuple(name.removeprefix("budget.") for name in differences)
        raise SpecError(
            f"name: {spec.name!r} is taken by a different run in {self.store} "
            f"(changed: {changed}); use another name, or start over with --fresh, which keeps the "
            "paid answers"
        )


def _unusable(folder: Path) -> SpecError:
    return ArgumentError(
        f"{folder}: cannot be written to; `fedone tune` also has --store FILE and --no-store"
    )
