"""Fine-tuning of all weights on the rows of all clients, as a trial."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from fedone_paper.federated import trial_backend, tuning_federation
from fedone_sdk.backends import predict
from fedone_sdk.baselines import FineTuning, bare_model
from fedone_sdk.evaluation.engine import Result, Workspace


def run_fine_tuning(options: dict[str, Any], workspace: Workspace) -> Result:
    """Fine-tune on the rows of a federation's clients, and measure the result on dev.

    Args:
        options: ``run``, whose method is not used; ``rates``, of which the one with the
            lowest held-out loss is taken; and ``max_epochs``.
        workspace: Has the inputs ``model``, ``train`` and ``dev``.
    """
    return asyncio.run(_run(options, workspace))


async def _run(options: dict[str, Any], workspace: Workspace) -> Result:
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
