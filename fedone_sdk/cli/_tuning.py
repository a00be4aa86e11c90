"""One run in this process, with progress, Ctrl-C and quiet logs: what tune and quickstart share."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fedone_sdk.cli._failures import naming
from fedone_sdk.cli._signals import stopping
from fedone_sdk.cli.progress import progress

if TYPE_CHECKING:
    from fedone_sdk.aggregator import ServedRun
    from fedone_sdk.aggregator.events import Effect
    from fedone_sdk.aggregator.run import CaughtUp
    from fedone_sdk.backends import LLMBackend
    from fedone_sdk.messages import RunResult
    from fedone_sdk.simulation import Federation, First
    from fedone_sdk.stores import Store
    from fedone_sdk.trackers import Tracking

__all__ = ["run_here"]


async def run_here(
    federation: Federation,
    *,
    source: Path,
    backend: LLMBackend,
    transport: Literal["http", "memory"],
    store: Store | None = None,
    state_dir: Path | None = None,
    tracking: Tracking | None = None,
    first: First | None = None,
    at_end: Callable[[ServedRun], None] | None = None,
) -> RunResult:
    """Runs a federation to its end, or to the first Ctrl-C.

    Args:
        federation: The run and its data.
        source: The file that a mistake would stand in.
        backend: The model; stays open.
        transport: How messages travel.
        store: Keeps the run.
        state_dir: Keeps the clients.
        tracking: Told of the run as well.
        first: What the model is asked before the run begins; see `simulate`.
        at_end: Called with the run when it has ended.
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
        served: list[ServedRun] = []

        def watch(run: ServedRun, effect: Effect | CaughtUp | None) -> None:
            if effect is None:
                served.append(run)
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
        )
    if tracking is not None:
        tracking.end(result)
    if at_end is not None:
        at_end(served[-1])
    return result
