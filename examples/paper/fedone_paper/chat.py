"""Trials that query a paid chat model over HTTP, each under its own hard cap.

A trial stores its spending in a file, so that interrupted attempts count as well. If a model does
not show a task's label words, the trial does not fail: its result is ``refused``, without a metric.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from decimal import Decimal
from itertools import islice, zip_longest
from typing import Any

from fedone_paper.federated import trial_backend, untrained_prompt
from fedone_paper.glue import glue_task
from fedone_sdk.backends import Answer, LLMBackend, Prediction, Query, Wrapper, predict
from fedone_sdk.budget import Budget, BudgetGuard, SqliteLedger, Usage
from fedone_sdk.errors import FedOneError, LabelsNotShown
from fedone_sdk.evaluation import label_bias
from fedone_sdk.evaluation.engine import Result, Workspace
from fedone_sdk.local import Federation, simulate
from fedone_sdk.spec import RunSpec, validate_spec
from fedone_sdk.task import Bias, form_of


def run_chat(options: dict[str, Any], workspace: Workspace) -> Result:
    """Measure a prompt on dev rows; the prompt is tuned in a federation, or given.

    Args:
        options: ``run``, ``task``, ``dev_rows`` and the cap ``usd``. Without tuning also
            ``prompt``: ``none``, ``untrained``, or ``biased``. The latter is no prompt with a label
            bias, which is fitted on ``bias_rows`` rows of the clients.
        workspace: Has the inputs ``train`` and ``dev``.

    Returns:
        ``metric``, ``prompt``, ``spent`` and other facts, and the ``status`` and ``rounds`` of a
        run.

    Raises:
        BudgetExhausted: Interrupted requests, which count as spent, have used up the cap.
        FedOneError: The run failed, so there is no tuned prompt.
    """
    federation = _federation(options, workspace)
    return asyncio.run(_paid(options, workspace, federation))


async def _measured(options: dict[str, Any], federation: Federation, backend: LLMBackend) -> Result:
    kind, prompt, bias, more = options.get("prompt"), "", None, {}
    if kind == "biased":
        bias = await _bias(backend, federation, options["bias_rows"])
    elif kind == "untrained":
        prompt = untrained_prompt(federation)
    elif kind is None:
        # Without dev rows, because the run would also measure other prompts on them.
        run = await simulate(replace(federation, dev=()), backend=backend)
        if run.status not in ("completed", "budget_exhausted"):
            raise FedOneError(f"the run ended as {run.status}: {run.reason}")
        prompt, bias = run.prompt.text, run.prompt.bias
        more = {"queries": run.spent.queries, "status": run.status, "rounds": run.rounds}
    found = await _predict(backend, federation, prompt, bias)
    return {
        "prompt": prompt,
        "bias": found.task.bias,
        "metric": found.metric,
        "name": found.task.metric,
        "mean_loss": found.mean_loss,
        "examples": len(found.examples),
        "failed": len(found.examples) - len(found.scored),
        "censored": found.censored,
        "models": list(found.models),
        **more,
    }


def _federation(options: dict[str, Any], workspace: Workspace) -> Federation:
    """Return a trial's federation, with the first ``dev_rows`` of the dev split."""
    data = {name: str(workspace.inputs[name]) for name in ("train", "dev")}
    task = glue_task(options["task"], "chat").model_dump(mode="json")
    document = {
        **options["run"],
        "task": {**task, **options.get("question", {})},
        "data": {**options["run"]["data"], **data},
    }
    loaded = Federation.load(validate_spec(RunSpec, document, source="trial"))
    return replace(loaded, dev=loaded.dev[: options["dev_rows"]])


async def _paid(options: dict[str, Any], workspace: Workspace, federation: Federation) -> Result:
    """Return a result with the trial's cost, also if the model shows no label words."""
    refusals: list[LabelsNotShown] = []

    class Noted(Wrapper):
        async def score(self, query: Query) -> Answer:
            try:
                return await self.inner.score(query)
            except LabelsNotShown as exc:
                refusals.append(exc)
                raise

    ledger = SqliteLedger(workspace.file("spent.sqlite"))
    usd = options["usd"] and Budget(usd=Decimal(options["usd"]))
    guard = BudgetGuard(usd, ledger=ledger)
    async with trial_backend(options["run"]["backend"], workspace, guard=guard) as backend:
        try:
            found = await _measured(options, federation, Noted(backend))
        except FedOneError:
            if not refusals:
                raise
            name = federation.spec.task.metric
            found = {"metric": None, "name": name, "models": [], "refused": str(refusals[0])}
    spent = (await guard.account()).spent + Usage(queries=found.pop("queries", 0))
    return {**found, "spent": spent.model_dump(mode="json")}


async def _predict(
    backend: LLMBackend, federation: Federation, prompt: str, bias: Bias | None = None
) -> Prediction:
    task = federation.spec.task.with_bias(bias)
    await backend.check(task.label_words, form_of(task))
    size = federation.spec.method.batch_size
    return await predict(backend, task, prompt, federation.dev, size)


async def _bias(backend: LLMBackend, federation: Federation, num_rows: int) -> Bias:
    """Return the label bias of no prompt, fitted on the first rows of the clients in turn."""
    in_turn = (row for rows in zip_longest(*federation.shards) for row in rows if row is not None)
    rows = tuple(islice(in_turn, num_rows))
    found = await _predict(backend, replace(federation, dev=rows), "")
    return label_bias(found.task, found.rows, found.examples)
