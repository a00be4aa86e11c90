"""Weights & Biases: one W&B run for each run, offline by default."""

from __future__ import annotations

import os
from typing import Any

from fedone_sdk.messages import RoundReport, RunResult
from fedone_sdk.trackers.tracker import TrackedRun, summary_of


class WandbTracker:
    """Writes to ``WANDB_DIR``, in the project ``WANDB_PROJECT`` (``fedone``).

    Data leaves the machine only if ``WANDB_MODE`` is ``online``; ``wandb sync`` sends it later.
    """

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        mode: Any = os.environ.get("WANDB_MODE", "offline")

        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "fedone"),
            name=run.name,
            config={**run.params, "run_id": run.run_id},
            mode=mode,
            # The command's console output is not recorded.
            settings=wandb.Settings(console="off", silent=True),
        )

    def round(self, report: RoundReport, queries: int) -> None:
        """Log its mean loss."""
        self._run.log({"mean_loss": report.mean_loss, "round": report.round, "queries": queries})

    def metric(self, name: str, value: float, queries: int) -> None:
        """Log a point of the curve, over ``measured_at``, because it comes some rounds late."""
        self._run.log({f"dev_{name}": value, "measured_at": queries})

    def end(self, result: RunResult | None) -> None:
        """Log the final numbers and the prompt in the run's summary."""
        if result is None:
            self._run.finish(exit_code=1)
            return
        self._run.summary.update(
            {**summary_of(result), "prompt": result.prompt.text, "status": result.status}
        )
        self._run.finish(exit_code=int(result.status == "failed"))
