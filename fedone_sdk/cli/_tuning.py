"""One run in this process with progress and Ctrl-C, for tune, quickstart and retune."""

from __future__ import annotations

import asyncio
import shlex
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fedone_sdk.cli._failures import naming
from fedone_sdk.cli._output import note, plural
from fedone_sdk.cli._process import interruptible, stopping
from fedone_sdk.cli._report import is_resumable
from fedone_sdk.cli._state import KnownRun, RunState
from fedone_sdk.cli.export import exported_from, stored_run
from fedone_sdk.cli.progress import progress

if TYPE_CHECKING:
    from fedone_sdk.aggregator import ServedRun
    from fedone_sdk.aggregator.rounds.events import Effect
    from fedone_sdk.aggregator.serving.feed import RunReloaded
    from fedone_sdk.backends import LLMBackend
    from fedone_sdk.local import Federation, First
    from fedone_sdk.messages import RunResult
    from fedone_sdk.reports import ReportedRun
    from fedone_sdk.spec import RunSpec
    from fedone_sdk.stores import Store
    from fedone_sdk.trackers import Tracking


async def run_here(
    federation: Federation,
    *,
    source: Path,
    backend: LLMBackend,
    proposer: LLMBackend | None = None,
    transport: Literal["http", "memory"] = "memory",
    store: Store | None = None,
    state_dir: Path | None = None,
    tracking: Tracking | None = None,
    first: First | None = None,
) -> RunResult:
    """Run a federation to its end, or to the first Ctrl-C; see `simulate`.

    Errors name `source`, the run's file.
    """
    from fedone_sdk.local import simulate

    stop = asyncio.Event()

    def stop_gracefully() -> None:
        stop.set()
        note("stopping, measuring the prompt so far; Ctrl-C again aborts")

    with (
        stopping(stop_gracefully, then_cancel=True),
        progress(federation.spec.name) as shown,
        naming(str(source)),
    ):

        def watch(run: ServedRun, effect: Effect | RunReloaded | None) -> None:
            shown(run, effect)
            if tracking is not None:
                tracking(run, effect)

        result = await simulate(
            federation,
            backend=backend,
            transport=transport,
            store=store,
            state_dir=state_dir,
            watch=watch,
            stop=stop,
            first=first,
            proposer=proposer,
        )
    if tracking is not None:
        tracking.end(result)
    return result


def next_steps(
    spec: RunSpec, result: RunResult, state: RunState | None, known: KnownRun | None
) -> Iterator[str]:
    """Yield the lines below a result: where the run is kept, and the command that continues it."""
    if state is None:
        if is_resumable(result):
            cache = spec.backend.cache
            kept = "nothing" if cache is None else f"nothing but the answers in {cache}"
            yield f"{result.reason}; {kept} is kept because of --no-store"
        return
    place = shlex.quote(str(state.store))
    if not result.rounds and result.status == "budget_exhausted":
        yield (
            "no round was done, because the caps do not suffice for one; "
            "`fedone plan` shows the smallest useful cap, and a raised cap continues the run"
        )
    if known is not None and known.ended is None:
        free = result.cache.hits - known.cache_hits
        yield f"continued after round {known.round}; {plural(free, 'answer')} free, paid for before"
    if known is not None and known.ended is not None:
        yield (
            f"the run had ended before ({known.ended}); --fresh starts over, with the answers kept"
        )
    elif is_resumable(result):
        yield f"{result.reason}; continue with: {same_command()}"
    if result.status == "budget_exhausted" and result.rounds:
        yield "a higher cap lets the run continue: in the file, or by --raise UNIT=N"
    own = " --run RUN.yaml" if spec.method.name == "own" else ""
    yield f"kept in {state.store}; a report: fedone report {result.run_id} --store {place}{own}"


def abortable(state: RunState | None) -> AbstractContextManager[None]:
    """At a second Ctrl-C, exits with a line that has the command that continues the run."""
    if state is None:
        return interruptible("aborted; nothing is kept because of --no-store")
    return interruptible(
        "aborted; pending requests count as spent. Continue with: " + same_command()
    )


def same_command() -> str:
    """Return the user's command without ``--fresh``, which would start over."""
    return shlex.join(["fedone", *(word for word in sys.argv[1:] if word != "--fresh")])


class KeptRun:
    """A run's store, which is read after the run."""

    def __init__(self, path: Path | None) -> None:
        from fedone_sdk.stores import MemoryStore, SqlStore

        self._path = path
        self.store: Store = MemoryStore() if path is None else SqlStore.sqlite(path)

    def run(self, run_id: str) -> ReportedRun:
        """Return the stored run."""
        if self._path is not None:
            return stored_run(run_id, store=str(self._path))
        from fedone_sdk.reports import read_export

        return read_export(asyncio.run(exported_from(self.store, run_id)))
