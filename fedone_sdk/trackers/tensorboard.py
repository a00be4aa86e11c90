"""TensorBoard: event files, written by tensorboardX's SummaryWriter."""

from __future__ import annotations

import os
from typing import Any

from fedone_sdk.messages import RoundReport, RunResult
from fedone_sdk.trackers.tracker import TrackedRun, summary_of


class TensorboardTracker:
    """Writes to the folder ``TENSORBOARD_LOGDIR``.

    By default the folder is ``runs/DATE_HOST-NAME``, SummaryWriter's own default.
    """

    def __init__(self, run: TrackedRun) -> None:
        from tensorboardX import SummaryWriter

        self._writer: Any = SummaryWriter(
            os.environ.get("TENSORBOARD_LOGDIR"), comment=f"-{run.name}"
        )
        table = "".join(f"    {name}: {value}\n" for name, value in run.params.items())
        self._writer.add_text("run", f"    run_id: {run.run_id}\n{table}", 0)

    def round(self, report: RoundReport, queries: int) -> None:
        """Log its mean loss."""
        self._writer.add_scalar("train/mean_loss", report.mean_loss, queries)

    def metric(self, name: str, value: float, queries: int) -> None:
        """Log a point of the curve."""
        self._writer.add_scalar(f"dev/{name}", value, queries)

    def end(self, result: RunResult | None) -> None:
        """Log the final numbers and the prompt."""
        if result is not None:
            for name, value in summary_of(result).items():
                self._writer.add_scalar(f"final/{name}", value, result.spent.queries)
            # Indented, so that Markdown renders it verbatim.
            lines = "\n".join(f"    {line}" for line in result.prompt.text.splitlines())
            self._writer.add_text("prompt", lines, result.spent.queries)
        self._writer.close()
