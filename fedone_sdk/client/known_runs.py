"""Cache of the tasks and vocabularies of the runs that a device works for."""

from __future__ import annotations

from typing import TypeVar

from fedone_sdk.backends.base import LLMBackend
from fedone_sdk.client.batch import Declining, Unfit
from fedone_sdk.client.session import Session
from fedone_sdk.messages import RunTask
from fedone_sdk.task import form_of
from fedone_sdk.vocabulary import Vocabulary

_MOST = 8
"""Runs in the cache; the least recently used one is evicted."""

T = TypeVar("T")


class KnownRuns:
    """Tasks and vocabularies by run, each with its version: a run's candidates can grow.

    Their label words are checked against the device's own model.
    """

    def __init__(self, session: Session, backend: LLMBackend | None) -> None:
        self._session = session
        self._backend = backend
        self._tasks: dict[str, RunTask] = {}
        self._vocabularies: dict[str, tuple[int, Vocabulary]] = {}

    async def task(self, run_id: str, version: int = 0) -> RunTask:
        """Return a run's task, with at least this version of its candidates.

        Raises:
            Unfit: The run scores with another model than the device's.
        """
        known = self._tasks.get(run_id)
        if known is None or known.vocabulary_version < version:
            known = await self._session.call(self._session.transport.task, run_id)
            if self._backend is not None:
                await self._backend.check(known.task.label_words, form_of(known.task))
                own = self._backend.fingerprint
                if known.model not in (None, own):
                    raise Unfit(f"the run scores with {known.model!r}, the device with {own!r}")
        _keep(self._tasks, run_id, known)
        return known

    async def vocabulary(self, run_id: str, version: int = 0) -> Vocabulary:
        """Return a run's candidates, in at least this version.

        Raises:
            Declining: They are not the run's, or its task cannot use them.
        """
        known = self._vocabularies.get(run_id)
        if known is None or known[0] < version:
            run = await self.task(run_id, version)
            known = run.vocabulary_version, await self._fetched(run, run_id, known)
        _keep(self._vocabularies, run_id, known)
        return known[1]

    def forget(self) -> None:
        """Clear the cache: another server may have other runs of the same names."""
        self._tasks.clear()
        self._vocabularies.clear()

    async def _fetched(
        self, run: RunTask, run_id: str, known: tuple[int, Vocabulary] | None
    ) -> Vocabulary:
        """Fetch a run's candidates, or those added since a version, and check their label words."""
        from fedone_sdk.candidates import label_checks

        version, before = known or (0, None)
        listed = await self._session.call(self._session.transport.vocabulary, run_id, version)
        try:
            vocabulary = listed.vocabulary(before if version else None)
            checks = label_checks(run.task, vocabulary) if vocabulary.slots else ()
        except ValueError as exc:
            raise Declining("the vocabulary is malformed") from exc
        if vocabulary.sha256 != run.vocabulary_sha256:
            self.forget()  # Candidates may have been added between the two answers.
            raise Declining("the vocabulary does not fit its run")
        if self._backend is not None:
            for words, form in checks:
                await self._backend.check(words, form)
        return vocabulary


def _keep(cache: dict[str, T], run_id: str, value: T) -> None:
    """Make a run the most recently used one, and evict the least recently used ones."""
    cache.pop(run_id, None)
    cache[run_id] = value
    while len(cache) > _MOST:
        del cache[next(iter(cache))]
