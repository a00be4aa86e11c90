"""One run in this process, with progress and Ctrl-C: what tune, quickstart and retune share."""

from __future__ import annotations

import asyncio
import shlex
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fedone_sdk.cli._failures import naming
from fedone_sdk.cli._output import plural
from fedone_sdk.cli._report import can_go_on
from fedone_sdk.cli._signals import interruptible, stopping
from fedone_sdk.cli._state import KnownRun, RunState
from fedone_sdk.cli.archives import stored_run
from fedone_sdk.cli.progress import progress

if TYPE_CHECKING:
    from fedone_sdk.aggregator import ServedRun
    from fedone_sdk.aggregator.rounds.events import Effect
    from fedone_sdk.aggregator.serving.run import CaughtUp
    from fedone_sdk.backends import LLMBackend
    from fedone_sdk.messages import RunResult
    from fedone_sdk.reports import ReportedRun
    from fedone_sdk.simulation import Federation, First
    from fedone_sdk.spec import RunSpec
    from fedone_sdk.stores import Store
    from fedone_sdk.trackers import Tracking

__all__ = ["KeptRun", "abortable", "run_here", "same_command", "what_is_next"]


async def run_here(
    federation: Federation,
    *,
    source: Path,
    backend: LLMBackend,
    proposer: LLMBackend | None = None,
    transport: Literal["http", "memory"],
    store: Store | None = None,
    state_dir: Path | None = None,
    tracking: Tracking | None = None,
    first: First | None = None,
) -> RunResult:
    """Runs a federation to its end, or to the first Ctrl-C.

    Args:
        federation: The run and its data.
        source: The file that a mistake would stand in.
        backend: The model; stays open.
        proposer: The model of ``prompt.proposer``; stays open.
        transport: How messages travel.
        store: Keeps the run.
        state_dir: Keeps the clients.
        tracking: Told of the run as well.
        first: What the model is asked before the run begins; see `simulate`.
    """
    from fedone_sdk.baselines import trainer_of
    from fedone_sdk.simulation import simulate

    stop = asyncio.Event()

    def stop_in_good_order() -> None:
        stop.set()
        print("stopping, the prompt so far is measured; Ctrl-C again aborts", file=sys.stderr)

    with (
        stopping(stop_in_good_order),
        progress(federation.spec.name) as shown,
        naming(str(source)),
    ):

        def watch(run: ServedRun, effect: Effect | CaughtUp | None) -> None:
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
            trainer=trainer_of(federation.spec.method, backend),
            proposer=proposer,
        )
    if tracking is not None:
        tracking.end(result)
    return result


def what_is_next(
    spec: RunSpec, result: RunResult, state: RunState | None, known: KnownRun | None
) -> Iterator[str]:
    """The lines below a result: where the run is kept, and the command that goes on."""
    if state is None:
        if can_go_on(result):
            cache = spec.backend.cache
            kept = "nothing" if cache is None else f"nothing but the answers in {cache}"
            yield f"{result.reason}; {kept} is kept because of --no-store"
        return
    place = shlex.quote(str(state.store))
    if not result.rounds and result.status == "budget_exhausted":
        yield (
            "no round was done: the caps pay for none; "
            "`fedone plan` says the smallest useful cap, and a raised cap lets the run go on"
        )
    if known is not None and known.ended is None:
        free = result.cache.hits - known.cache_hits
        yield f"went on after round {known.round}; {plural(free, 'answer')} free, paid for before"
    if known is not None and known.ended is not None:
        yield (
            f"the run had ended before ({known.ended}); --fresh starts over, with the answers kept"
        )
    elif can_go_on(result):
        yield f"{result.reason}; goes on with: {same_command()}"
    if result.status == "budget_exhausted" and result.rounds:
        yield "a higher cap lets the run go on: in the file, or by --raise UNIT=N"
    yield f"kept in {state.store}; a report: fedone report {result.run_id} --store {place}"


def abortable(state: RunState | None) -> AbstractContextManager[None]:
    """Ends the command at a second Ctrl-C with the line that says how the run goes on."""
    if state is None:
        return interruptible("aborted; nothing is kept because of --no-store")
    return interruptible(
        "aborted; what was under way counts as spent. The run goes on with: " + same_command()
    )


def same_command() -> str:
    """The command that was typed, without ``--fresh``, which would start over."""
    return shlex.join(["fedone", *(word for word in sys.argv[1:] if word != "--fresh")])


def _store(path: Path | None) -> Store | None:
    from fedone_sdk.stores import SqlStore

    return None if path is None else SqlStore.sqlite(path)


class KeptRun:
    """A run's store, which is read when the run is over.

    Attributes:
        store: The store.
    """

    def __init__(self, path: Path | None) -> None:
        from fedone_sdk.stores import MemoryStore

        self._path = path
        self.store: Store = _store(path) or MemoryStore()

    def run(self, run_id: str) -> ReportedRun:
        """What was kept of a run."""
        if self._path is not None:
            return stored_run(run_id, None, None, str(self._path))
        return asyncio.run(self._from_memory(run_id))

    async def _from_memory(self, run_id: str) -> ReportedRun:
        from fedone_sdk.aggregator.serving.archive import export_run
        from fedone_sdk.reports import run_of_archive

        return await run_of_archive(await export_run(self.store, run_id))
