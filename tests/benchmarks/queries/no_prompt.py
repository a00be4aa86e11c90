"""Baselines without a prompt: the bare task, with and without a label bias from clients' rows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fedone_sdk.backends import predict
from fedone_sdk.calibration import LabelFree
from fedone_sdk.comparison.rows import pooled_rows
from fedone_sdk.experiments.experiment import Result, Trial, Workspace
from fedone_sdk.experiments.federated import trial_backend, tuning_federation
from fedone_sdk.experiments.settings import Settings
from fedone_sdk.experiments.statistics import proportion_interval
from fedone_sdk.task import Bias, Example, TaskSpec, form_of
from tests.benchmarks.queries.label_rows import BATCH_SIZE, LabelRows

if TYPE_CHECKING:
    from fedone_sdk.backends import LLMBackend
    from fedone_sdk.simulation import Federation

__all__ = ["no_prompt_trial", "run_no_prompt"]


_LABEL_FREE: tuple[LabelFree, ...] = ("contextual", "batch")


def no_prompt_trial(
    key: str, settings: Settings, task: str, run: dict[str, Any], bias_rows: int
) -> Trial:
    """Return the trial that measures the task without a prompt.

    Args:
        key: Of the trial.
        settings: The user's settings.
        task: The GLUE task of the rows.
        run: Determines the clients' rows; its method is not used.
        bias_rows: Client rows that the bias is fitted on.

    Raises:
        SpecError: There is no data for the task.
    """
    return Trial(
        key=key,
        run=run_no_prompt,
        function="fedone_sdk.experiments.no_prompt:run_no_prompt",
        options={"run": run, "seed": run["seed"], "bias_rows": bias_rows},
        inputs=settings.inputs(task),
    )


def run_no_prompt(options: dict[str, Any], workspace: Workspace) -> Result:
    """Measure the bare task on the dev split, with a bias from ``bias_rows`` client rows.

    Returns:
        Of the bare model (``plain``), with the fitted ``bias`` (``calibrated``), with one fitted on
        the same rows with equal class weights (``balanced``), and with label-free biases
        (``contextual``; ``batch``, over the whole dev split): ``loss``
        (cross-entropy, nats), ``metric`` and ``accuracy``; the ``queries`` of the bias;
        the ``interval`` (95 %, exact) of the calibrated accuracy, and ``majority``, the share of
        the dev split's largest class.
    """
    federation = tuning_federation(options, workspace)
    return asyncio.run(_measured(federation, options, workspace))


async def _measured(
    federation: Federation, options: dict[str, Any], workspace: Workspace
) -> dict[str, Any]:
    began, task = time.monotonic(), federation.spec.task
    held = pooled_rows(federation, options["bias_rows"])
    async with trial_backend(options["run"]["backend"], workspace, keep=False) as backend:
        await backend.check(task.label_words, form_of(task))
        known = await LabelRows.ask(backend, task, "", held)
        rows = await LabelRows.ask(backend, task, "", federation.dev)
        label_free: dict[str, Any] = {
            kind: _numbers(rows, await _label_free(backend, task, federation.dev, kind))
            for kind in _LABEL_FREE
        }
        model = backend.fingerprint
    bias = known.fitted()
    hits = round(rows.accuracy(bias) * len(rows.targets))
    _, low, high = proportion_interval(hits, len(rows.targets))
    return {
        "seed": federation.spec.seed,
        "plain": _numbers(rows, None),
        "calibrated": _numbers(rows, bias.tolist()),
        "balanced": _numbers(rows, known.fitted(balanced=True).tolist()),
        **label_free,
        "bias": bias.tolist(),
        "queries": -(-len(held) // BATCH_SIZE),
        "interval": [low, high],
        "majority": max(rows.targets.tolist().count(label) for label in range(len(task.labels)))
        / len(rows.targets),
        "model": model,
        "wall_s": time.monotonic() - began,
    }


async def _label_free(
    backend: LLMBackend, task: TaskSpec, dev: Sequence[Example], kind: LabelFree
) -> Bias | None:
    # The answers are cached.
    return (await predict(backend, task, "", dev, BATCH_SIZE, calibration=kind)).task.bias


def _numbers(rows: LabelRows, bias: Sequence[float] | None) -> dict[str, float]:
    return {"loss": rows.loss(bias), "metric": rows.metric(bias), "accuracy": rows.accuracy(bias)}
