"""Fine-tuning as a trial: all weights, on all that the clients hold, in one place."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from fedone_sdk.experiments.experiment import Result, Trial, Workspace
from fedone_sdk.experiments.federated import (
    Tuning,
    run_document,
    trial_backend,
    tuning_federation,
)
from fedone_sdk.experiments.settings import Settings

__all__ = ["fine_tuning_trial", "run_fine_tuning"]


def fine_tuning_trial(
    key: str, settings: Settings, tuning: Tuning, *, rates: tuple[float, ...], max_epochs: int
) -> Trial:
    """The trial that fine-tunes a model on the rows of a federation's clients.

    Args:
        key: Of the trial.
        settings: What the user asked for.
        tuning: The federation; its method has no part in this.
        rates: Learning rates; the one with the lowest held-out loss is taken.
        max_epochs: The most passes over the rows.

    Raises:
        SpecError: There is no data for the task.
    """
    return Trial(
        key=key,
        run=run_fine_tuning,
        options={
            "run": run_document(tuning, settings.backend("transformers")),
            "seed": tuning.seed,
            "rates": list(rates),
            "max_epochs": max_epochs,
        },
        inputs=settings.inputs(tuning.task),
    )


def run_fine_tuning(options: dict[str, Any], workspace: Workspace) -> Result:
    """Fine-tunes at every rate, and measures the one of the lowest held-out loss on dev."""
    return asyncio.run(_run(options, workspace))


async def _run(options: dict[str, Any], workspace: Workspace) -> Result:
    from fedone_sdk.backends import predict
    from fedone_sdk.baselines import FineTuning, bare_model

    began = time.monotonic()
    federation = tuning_federation(options, workspace)
    task, seed = federation.spec.task, federation.spec.seed
    # Clients may share rows; here each counts once.
    rows = list({id(row): row for shard in federation.shards for row in shard}.values())
    async with trial_backend(options["run"]["backend"], workspace) as backend:
        model = bare_model(backend)
        tried = []
        for rate in options["rates"]:
            way = FineTuning(learning_rate=rate, max_epochs=options["max_epochs"])
            fitted = await way.fit(model, task, rows, seed=seed)
            async with fitted.backend as tuned:
                found = await predict(tuned, task, "", federation.dev, way.batch_size)
            tried.append((min(fitted.held_out_losses), rate, fitted, found))
        lowest, rate, fitted, found = min(tried, key=lambda trial: trial[0])
        return {
            "metric": {"name": task.metric, "after": found.metric},
            "mean_loss": found.mean_loss,
            "learning_rate": rate,
            "held_out_loss": lowest,
            "epochs": fitted.best_epoch,
            "rows": len(rows),
            "model": backend.fingerprint,
            "reused_rows": federation.reused_rows,
            "wall_s": time.monotonic() - began,
        }
