"""Progress of a run or of an experiment: a bar on a terminal, else plain lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fedone_sdk.cli._output import plural, size, terminal

if TYPE_CHECKING:
    from fedone_sdk.aggregator import ServedRun
    from fedone_sdk.aggregator.rounds.events import Effect
    from fedone_sdk.aggregator.serving.feed import RunReloaded
    from fedone_sdk.evaluation.engine import Progress as TrialProgress

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

    def __call__(self, run: ServedRun, effect: Effect | RunReloaded | None) -> None:
        """Handle an effect. It is called for every message, and therefore cheap."""
        from fedone_sdk.aggregator.rounds.events import RoundFinished, RunEnded

        if self._began is None:
            self._began = time.monotonic(), _share(run)
            self.text = (
                f"starting, up to {plural(run.spec.rounds, 'round')} of {run.spec.method.label}, "
                f"{plural(run.spec.prompt.length, 'position')}, "
                f"{plural(len(run.vocabulary), 'candidate')}"
            )
            self.show(end=True)
        if isinstance(effect, RoundFinished):
            loss = effect.report.mean_loss
            self._loss = (
                loss if self._loss is None else self._loss + _SMOOTHING * (loss - self._loss)
            )
            measured = self._has_new_metric(run)
            self.share = _share(run)
            self.text = self._line(run)
            self.show(end=measured)
        elif isinstance(effect, RunEnded):
            self.share = 1.0
            self.text = f"{self._line(run)}, {effect.status}"
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
