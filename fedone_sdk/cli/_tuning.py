"""One run in this process with its progress and Ctrl-C, for tune, quickstart and retune."""

from __future__ import annotations

import asyncio
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fedone_sdk.cli._output import is_resumable, note, plural, size, terminal
from fedone_sdk.cli._process import interruptible, naming, stopping
from fedone_sdk.cli._run_file import KnownRun, RunState
from fedone_sdk.cli.report import exported_from, stored_run

if TYPE_CHECKING:
    from fedone_sdk.aggregator import ServedRun
    from fedone_sdk.aggregator.serving.feed import Change
    from fedone_sdk.backends import LLMBackend
    from fedone_sdk.evaluation.engine import Progress as TrialProgress
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

        def watch(run: ServedRun, change: Change | None) -> None:
            shown(run, change)
            if tracking is not None:
                tracking(run, change)

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


_SMOOTHING = 0.1
"""Weight of the newest round in the displayed mean loss, which smooths single mini-batches."""

_LINE_EVERY_S = 1.0


class _Bar:
    """A bar, with a text of at most 80 columns below it."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.text = "starting"
        self.share = 0.0

    def __rich__(self) -> Group:
        bar = Table.grid(padding=(0, 1))
        bar.add_row(
            Text(self.title, style="bold"), ProgressBar(total=1.0, completed=self.share, width=40)
        )
        return Group(bar, Text(self.text, no_wrap=True, overflow="ellipsis"))


def _time_left(began: float, done: float, left: float) -> str:
    """Return the remaining time of work at its speed since `began`; nothing if it is not known."""
    if done <= 0 or left <= 0:
        return ""
    seconds = (time.monotonic() - began) * left / done
    return f", {seconds:.0f} s left" if seconds < 100 else f", {seconds / 60:.0f} min left"


class Progress(_Bar):
    """Observer of a run, with its progress as `text`."""

    def __init__(self, title: str) -> None:
        super().__init__(title)
        self._loss: float | None = None
        self._metric = ""
        self._seen = 0
        self._began: tuple[float, float] | None = None

    def __call__(self, run: ServedRun, change: Change | None) -> None:
        """Handle a change. It is called for every message, and therefore cheap."""
        if self._began is None:
            self._began = time.monotonic(), _share(run)
            self.text = (
                f"starting, up to {plural(run.spec.rounds, 'round')} of {run.spec.method.label}, "
                f"{plural(run.spec.prompt.length, 'position')}, "
                f"{plural(len(run.vocabulary), 'candidate')}"
            )
            self.show(end=True)
        if change is None:
            return
        if change.finished is not None:
            loss = change.finished.report.mean_loss
            self._loss = (
                loss if self._loss is None else self._loss + _SMOOTHING * (loss - self._loss)
            )
            measured = self._has_new_metric(run)
            self.share = _share(run)
            self.text = self._line(run)
            self.show(end=measured)
        if change.ended:
            self.share = 1.0
            self.text = f"{self._line(run)}, {run.state.status}"
            self.show(end=True)

    def show(self, *, end: bool) -> None:
        """Show a changed `text`; `end` marks a text that must be shown."""

    def _has_new_metric(self, run: ServedRun) -> bool:
        """Whether there is a new point of the curve."""
        # Points arrive some rounds late and update their entry, so the last few are checked again.
        for report in reversed(run.history):
            if report.round < self._seen:
                break
            if report.metric is not None:
                self._seen = report.round + 1
                self._metric = f", {run.spec.task.metric} {report.metric:.3f}"
                return True
        return False

    def _line(self, run: ServedRun) -> str:
        state, budget = run.state, run.state.account.cap
        cap = "" if budget is None or budget.queries is None else f"/{budget.queries}"
        traffic = run.counters.communication
        loss = "" if self._loss is None else f", loss {self._loss:.3f}"
        began, done_before = self._began or (0.0, 1.0)
        left = _time_left(began, self.share - done_before, 1 - self.share)
        return (
            f"round {state.round}/{run.spec.rounds}{loss}{self._metric}, "
            f"queries {state.account.spent.queries}{cap}, "
            f"{size(traffic.upload_bytes + traffic.download_bytes)}{left}"
        )


def _share(run: ServedRun) -> float:
    """Return the completed share of the run, by rounds or by budget, whichever ends first."""
    budget = run.state.account.cap
    shares = [run.state.round / run.spec.rounds]
    if budget is not None:
        shares += [
            float(amount / cap) for _, cap, amount in budget.pairs(run.state.account.spent) if cap
        ]
    return min(max(shares), 1.0)


class _Lines(Progress):
    """Plain lines: at the start, the end and each measurement, else at most one per second."""

    def __init__(self, title: str, console: Console) -> None:
        super().__init__(title)
        self._console = console
        self._printed = 0.0
        self._rounds = False

    def show(self, *, end: bool) -> None:
        """Print the line if it is time for one."""
        now = time.monotonic()
        first = not self._rounds and self.text.startswith("round")
        if end or first or now - self._printed >= _LINE_EVERY_S:
            self._console.print(f"{self.title}: {self.text}")
            self._printed = now
            self._rounds = self._rounds or first


@contextmanager
def progress(title: str) -> Iterator[Progress]:
    """Show progress on stderr inside the context."""
    console = terminal(stderr=True)
    if not console.is_terminal:
        yield _Lines(title, console)
        return
    shown = Progress(title)
    with Live(shown, console=console, transient=True, refresh_per_second=8):
        yield shown


class _Trials(_Bar):
    """Observer of trials, with their progress as `text`."""

    def __call__(self, progress: TrialProgress) -> None:
        self.share = (progress.done + progress.failed) / progress.total
        self.text = progress.text


@contextmanager
def trial_progress(title: str) -> Iterator[Callable[[TrialProgress], None]]:
    """Show progress on stderr inside the context."""
    console, trials = terminal(stderr=True), _Trials(title)

    def note(progress: TrialProgress) -> None:
        trials(progress)
        if not console.is_terminal:
            console.print(f"{title}: {trials.text}")

    if not console.is_terminal:
        yield note
        return
    with Live(trials, console=console, transient=True, refresh_per_second=4):
        yield note
