"""Weights & Biases: one run of theirs for each run, offline unless you say otherwise."""

from __future__ import annotations

import os
from typing import Any

from fedone_sdk.messages import RoundReport, RunResult
from fedone_sdk.trackers.summary import summary_of
from fedone_sdk.trackers.tracker import TrackedRun

__all__ = ["WandbTracker"]


class WandbTracker:
    """Writes to ``WANDB_DIR``, as ``WANDB_PROJECT`` (``fedone``).

    Nothing leaves the machine unless ``WANDB_MODE`` is ``online``; ``wandb sync`` sends it later.

    Args:
        run: What is tracked.
    """

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        mode: Any = os.environ.get("WANDB_MODE", "offline")

        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "fedone"),
            name=run.name,
            config={**run.params, "run_id": run.run_id},
            mode=mode,
            # What a command prints is its own; nothing of it is recorded.
            settings=wandb.Settings(console="off", silent=True),
        )

    def round(self, report: RoundReport, queries: int) -> None:
        """Its mean loss."""
        self._run.log({"mean_loss": report.mean_loss, "round": report.round, "queries": queries})

    def metric(self, name: str, value: float, queries: int) -> None:
        """A point of the curve; over ``measured_at``, as it comes some rounds late."""
        self._run.log({f"dev_{name}": value, "measured_at": queries})

    def end(self, result: RunResult | None) -> None:
        """The final numbers and the prompt, as the run's summary."""
        if result is None:
            self._run.finish(exit_code=1)
            return
        self._run.summary.update(
            {**summary_of(result), "prompt": result.prompt.text, "status": result.status}
        )
        self._run.finish(exit_code=int(result.status == "failed"))
