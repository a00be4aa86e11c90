"""A run in this process, for tune, quickstart and retune: its progress display and Ctrl-C."""

from __future__ import annotations

import asyncio
import math
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from rich.text import Text

from fedone_sdk import aggregator, local
from fedone_sdk.cli._output import is_resumable, note, plural, terminal
from fedone_sdk.cli._process import errors_in, interruptible, stopping
from fedone_sdk.cli._run_file import KnownRun, RunState
from fedone_sdk.messages import RunResult
from fedone_sdk.spec import RunSpec
from fedone_sdk.trackers import Tracking


async def run_here(
    federation: local.Federation,
    *,
    source: str | Path,
    tracking: Tracking | None = None,
    **options: Any,
) -> RunResult:
    """Run a federation to its end, or to the first Ctrl-C.

    Errors name `source`, the run's file. `options` are passed to `local.simulate`.
    """
    stop = asyncio.Event()

    def stop_gracefully() -> None:
        stop.set()
        note("stopping, measuring the prompt so far; Ctrl-C again aborts")

    with (
        stopping(stop_gracefully, then_cancel=True),
        shown(federation.spec.name) as show,
        errors_in(str(source)),
    ):
        progress = Progress(show)

        def watch(run: aggregator.ServedRun, change: aggregator.Change | None) -> None:
            progress(run, change)
            if tracking is not None:
                tracking(run, change)

        result = await local.simulate(federation, watch=watch, stop=stop, **options)
    if tracking is not None:
        tracking.end(result)
    return result


def next_steps(
    spec: RunSpec,
    result: RunResult,
    state: RunState | None,
    known: KnownRun | None,
    run_path: Path,
    report: Path | None,
    raising: str = "--raise UNIT=N",
) -> Iterator[str]:
    """Yield the lines to print below a result: where the run is kept, and how it continues.

    `raising` is the command's option for a higher cap.
    """
    if state is None:
        if is_resumable(result):
            cache = spec.backend.cache
            kept = "" if cache is None else f"; its answers are in {cache}"
            yield f"{result.reason}; the run is not stored (--no-store){kept}"
        return
    store = shlex.quote(str(state.store))
    if not result.rounds and result.status == "budget_exhausted":
        yield (
            "no round was done, because the caps do not suffice for one round; "
            "`fedone plan` prints the smallest useful cap, and a raised cap continues the run"
        )
    if known is not None and known.ended is None:
        hits = result.cache.hits - known.cache_hits
        yield f"continued after round {known.round}; {plural(hits, 'answer')} came from the cache"
    if known is not None and known.ended is not None:
        yield f"the run had ended before ({known.ended}); --fresh starts over and reuses answers"
    elif is_resumable(result):
        yield f"{result.reason}; continue with: {same_command()}"
    if result.status == "budget_exhausted" and result.rounds:
        yield f"to continue the run, set a higher cap in the file, or with {raising}"
    run_file = f" --run {shlex.quote(str(run_path))}" if spec.method.name == "own" else ""
    command = f"; for a report: fedone report {result.run_id} --store {store}{run_file}"
    yield f"the run is in {state.store}{'' if report else command}"


def abortable(state: RunState | None) -> AbstractContextManager[None]:
    """At a second Ctrl-C, exit and print the command that continues the run."""
    if state is None:
        return interruptible("aborted; the run is not stored (--no-store)")
    return interruptible(
        "aborted; pending requests count as spent. Continue with: " + same_command()
    )


def same_command() -> str:
    """Return the user's command without ``--fresh``, which would start over."""
    return shlex.join(["fedone", *(word for word in sys.argv[1:] if word != "--fresh")])


_SMOOTHING = 0.1
"""Weight of the newest round in the displayed moving average of the loss."""

_LINE_EVERY_S = 1.0

Show = Callable[[str, bool], None]
"""Shows a text; if the flag is false, the text may be skipped."""


@contextmanager
def shown(title: str) -> Iterator[Show]:
    """Show a changing text on stderr: on a terminal in one line, otherwise one line per second."""
    console = terminal(stderr=True)
    if console.is_terminal:
        with console.status(Text(f"{title}: starting")) as status:
            yield lambda text, _: status.update(Text(f"{title}: {text}"))
        return
    printed = 0.0

    def show(text: str, must: bool) -> None:
        nonlocal printed
        now = time.monotonic()
        if must or now - printed >= _LINE_EVERY_S:
            console.print(f"{title}: {text}")
            printed = now

    yield show


class Progress:
    """Shows the progress of a run; called with each change of the run."""

    def __init__(self, show: Show) -> None:
        self._show = show
        self._loss: float | None = None
        self._metric = ""
        self._began: tuple[float, float] | None = None
        self._has_round = False

    def __call__(self, run: aggregator.ServedRun, change: aggregator.Change | None) -> None:
        """Show the progress after a change of the run."""
        if self._began is None:
            self._began = time.monotonic(), _share(run)
            text = (
                f"starting, up to {plural(run.spec.rounds, 'round')} of {run.spec.method.label}, "
                f"{plural(run.spec.prompt.length, 'position')}, "
                f"{plural(len(run.vocabulary), 'candidate')}"
            )
            self._show(text, True)
        if change is None:
            return
        if change.measured:  # A round's metric arrives some rounds later.
            metrics = (one.metric for one in reversed(run.history) if one.metric is not None)
            self._metric = f", {run.spec.task.metric} {next(metrics, math.nan):.3f}"
        if change.finished is not None:
            loss = change.finished.report.mean_loss
            mean = loss if self._loss is None else self._loss
            self._loss = mean + _SMOOTHING * (loss - mean)
        if change.finished is not None or change.measured:
            self._show(self._line(run), change.measured or not self._has_round)
            self._has_round = True
        if change.ended:
            self._show(f"{self._line(run)}, {run.state.status}", True)

    def _line(self, run: aggregator.ServedRun) -> str:
        state, budget = run.state, run.state.account.cap
        cap = "" if budget is None or budget.queries is None else f"/{budget.queries}"
        loss = "" if self._loss is None else f", loss {self._loss:.3f}"
        began, first_share = self._began or (0.0, 1.0)
        share = _share(run)
        left = ""
        if first_share < share < 1:
            seconds = (time.monotonic() - began) * (1 - share) / (share - first_share)
            left = f", {seconds:.0f} s left" if seconds < 100 else f", {seconds / 60:.0f} min left"
        return (
            f"round {state.round}/{run.spec.rounds}{loss}{self._metric}, "
            f"queries {state.account.spent.queries}{cap}{left}"
        )


def _share(run: aggregator.ServedRun) -> float:
    """Return the progress of a run: the largest used share of its rounds and of its caps."""
    budget = run.state.account.cap
    shares = [run.state.round / run.spec.rounds]
    if budget is not None:
        shares += [
            float(amount / cap) for _, cap, amount in budget.pairs(run.state.account.spent) if cap
        ]
    return min(max(shares), 1.0)
