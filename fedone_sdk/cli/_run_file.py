"""RUN.yaml: its spec, the objects that it describes, and the files in which its run is kept."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from fedone_sdk import backends, local, stores
from fedone_sdk.backends.build import build_backend
from fedone_sdk.budget import Budget
from fedone_sdk.cli._process import errors_in
from fedone_sdk.errors import ArgumentError, SpecError
from fedone_sdk.spec import BackendSpec, OwnMethodSpec, RunSpec, load_backend, validate_spec
from fedone_sdk.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFile:
    """A run's spec and its file."""

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
        # Keys that are not set in the file remain unset (`RunSpec.is_same_run`).
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
        """Base of the file's relative paths."""
        return self.path.parent

    def federation(self) -> local.Federation:
        """Return the run with its data."""
        with errors_in(str(self.path)):
            return local.Federation.load(self.spec, self.folder)

    def backend(self, *, cache: Path | None = None) -> backends.LLMBackend:
        """Return the model's client; answers are kept in `cache`, unless the run names a cache."""
        spec = self.spec.backend
        if cache is not None and spec.cache is None:
            spec = spec.model_copy(update={"cache": str(cache.absolute())})
        with errors_in(str(self.path)):
            return build_backend(spec, self.folder)


def backend_of(path: Path | None) -> backends.LLMBackend:
    """Return the model of a file with a `backend` section; the embedded model without a file."""
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
    """A stored run before the command continues it.

    Attributes:
        ended: The status of a run that has ended and cannot continue; None if it can continue.
        raised: The caps that this command raises, each as ``queries 300 -> 600``.
        cache_hits: Answers from the cache so far.
    """

    ended: str | None
    raised: tuple[str, ...]
    round: int
    cache_hits: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """The files of one run. Names never collide, because only the name of a store ends in .db."""

    store: Path
    clients: Path
    answers: Path

    @classmethod
    def of(cls, run_path: Path, name: str, store: Path | None = None) -> Self:
        """Return the files for ``--store``, by default in ``.fedone`` next to RUN.yaml."""
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
        """Create the default folder, with a .gitignore for all of its files."""
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
        """Return the stored run, if any; check that it can continue."""
        if not self.store.exists():
            self._remove_clients()
            return None

        store = stores.SqlStore.sqlite(self.store)
        await store.open()
        try:
            if fresh:
                await self._clear(store, spec.name)
            known = await store.run(spec.name)
            if not await store.tokens():  # The clients' secret belongs to another store.
                self._remove_clients()
        finally:
            await store.close()
        if known is None:
            return None
        document = json.loads(known.document)
        raised = self._compare(known, document["account"]["cap"], spec, vocabulary)
        status: str = document["status"]
        if model is not None and document["model"] not in (None, model):
            raise SpecError(
                f"backend: is {model!r}, but the run {spec.name!r} in {self.store} was scored by "
                f"{document['model']!r}; start over with --fresh, or rename the backend's file"
            )
        return KnownRun(
            ended=status if status in _FINAL and not raised else None,
            raised=raised,
            round=document["round"],
            cache_hits=document["counters"]["cache_hits"],
        )

    async def _clear(self, store: stores.SqlStore, name: str) -> None:
        others = sorted((await store.versions()).keys() - {name})
        if others:
            raise ArgumentError(
                f"--fresh: {self.store} also has other runs ({', '.join(others)}); "
                "use another --store"
            )
        await store.clear()

    def _remove_clients(self) -> None:
        shutil.rmtree(self.clients, ignore_errors=True)

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
            changed = "the candidates, because of prompt or the data"
        else:
            return tuple(name.removeprefix("budget.") for name in differences)
        raise SpecError(
            f"name: {spec.name!r} is taken by a run with another description in {self.store} "
            f"(changed: {changed}); use another name, or start over with --fresh, which keeps the "
            "paid answers"
        )


def _unusable(folder: Path) -> SpecError:
    return ArgumentError(
        f"{folder}: cannot be written to; --store FILE keeps the run in another place, --no-store "
        "does not keep it"
    )
