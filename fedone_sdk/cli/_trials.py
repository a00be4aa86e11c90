"""Progress of an experiment: a bar on a terminal, else plain lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fedone_sdk.cli._output import terminal

if TYPE_CHECKING:
    from fedone_sdk.experiments.engine import Progress


class _State:
    """The displayed progress of the engine."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.text = "starting"
        self.share = 0.0
        self._began = time.monotonic()

    def __call__(self, progress: Progress) -> None:
        ended = progress.done + progress.failed
        self.share = ended / progress.total
        kept = f" ({progress.kept} were there already)" if progress.kept else ""
        failed = f", {progress.failed} failed" if progress.failed else ""
        last = f", last {progress.last}" if progress.last else ""
        self.text = f"{ended} of {progress.total} trials{kept}{failed}{self._left(progress)}{last}"

    def _left(self, progress: Progress) -> str:
        ended = progress.done + progress.failed
        new = ended - progress.kept
        if not new or ended == progress.total:
            return ""
        seconds = (time.monotonic() - self._began) / new * (progress.total - ended)
        return f", {seconds:.0f} s left" if seconds < 100 else f", {seconds / 60:.0f} min left"

    def __rich__(self) -> Group:
        bar = Table.grid(padding=(0, 1))
        bar.add_row(
            Text(self.title, style="bold"), ProgressBar(total=1.0, completed=self.share, width=40)
        )
        return Group(bar, Text(self.text, no_wrap=True, overflow="ellipsis"))


@contextmanager
def trial_progress(title: str) -> Iterator[Callable[[Progress], None]]:
    """Shows progress on stderr inside the context; each failure is a separate line."""
    console, state = terminal(stderr=True), _State(title)

    def note(progress: Progress) -> None:
        state(progress)
        if progress.failure is not None:
            console.print(f"{title}: {progress.last} failed: {progress.failure}")
        if progress.note is not None:
            console.print(progress.note)
        if not console.is_terminal:
            console.print(f"{title}: {state.text}")

    if not console.is_terminal:
        yield note
        return
    with Live(state, console=console, transient=True, refresh_per_second=4):
        yield note
