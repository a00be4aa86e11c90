"""Export of a run as JSON lines, and reading of a stored run.

The first line has the kind ``run``: the description, the candidates and the untrained prompt. The
lines of the run's log follow, oldest first, each with its kind: ``round``, ``metric``,
``outcomes``, ``lost``, ``rollback``, ``budget``. The last line has the kind ``result`` and the keys
of a `RunResult`.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable
from typing import Any

from fedone_sdk.aggregator.rounds import RoundMachine
from fedone_sdk.aggregator.runtime import in_thread_if_large
from fedone_sdk.aggregator.serving.run_view import RunView
from fedone_sdk.clock import SystemClock
from fedone_sdk.errors import ResultError
from fedone_sdk.spec import RunSpec
from fedone_sdk.stores import LogEntry, Store, log_pages
from fedone_sdk.vocabulary import Vocabulary


async def open_run(store: Store, run_id: str) -> RunView:
    """Return a stored run that this process does not serve; a `ResultError` if there is none."""
    record = await store.run(run_id)
    if record is None:
        raise ResultError(f"there is no run {run_id!r} in the store")
    vocabulary = Vocabulary.parse(record.candidates)
    machine = RoundMachine.of(run_id, RunSpec.model_validate_json(record.spec), vocabulary)
    run = RunView(machine, vocabulary, SystemClock())
    await run.read(record, log_pages(store, run_id))
    return run


async def export_run(store: Store, run: RunView) -> AsyncIterator[bytes]:
    """Yield a run as JSON lines, at its current version."""
    result, version = run.result(), run.version
    untrained = run.prompt(run.machine.initial_state())
    # With the first page, so that a store that is away is an error and not a cut answer.
    waiting = _line(
        kind="run",
        created_at=run.summary.created_at,
        spec=run.spec.model_dump(mode="json"),
        candidates=json.loads(run.vocabulary.dump()),
        untrained=untrained.model_dump(mode="json"),
    )
    async for page in log_pages(store, run.run_id):
        entries = [entry for entry in page if entry.version <= version]
        size = sum(len(entry.body) for entry in entries)
        yield waiting + await in_thread_if_large(size, _lines, entries)
        waiting = b""
    yield waiting + _line(kind="result", **result.model_dump(mode="json"))


def _lines(entries: Iterable[LogEntry]) -> bytes:
    return b"".join(_line(kind=entry.kind, **json.loads(entry.body)) for entry in entries)


def _line(**document: Any) -> bytes:
    return f"{json.dumps(document, ensure_ascii=False)}\n".encode()
