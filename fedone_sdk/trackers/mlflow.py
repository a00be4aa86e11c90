"""MLflow: one MLflow run for each run."""

from __future__ import annotations

import os
from typing import Any

from fedone_sdk.messages import RoundReport, RunResult
from fedone_sdk.trackers.tracker import TrackedRun, summary_of


class MlflowTracker:
    """Writes to ``MLFLOW_TRACKING_URI``, in the experiment ``MLFLOW_EXPERIMENT_NAME`` (``fedone``).

    MLflow's other variables apply too. Its usage telemetry is off, unless
    ``MLFLOW_DISABLE_TELEMETRY`` is set.
    """

    def __init__(self, run: TrackedRun) -> None:
        # Read when MLflow is imported.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        self._client: Any = MlflowClient()
        self._id = self._client.create_run(
            self._experiment(), run_name=run.name, tags={"fedone.run_id": run.run_id}
        ).info.run_id
        params = [Param(name, str(value)) for name, value in run.params.items()]
        for at in range(0, len(params), 100):  # The limit of one request.
            self._client.log_batch(self._id, params=params[at : at + 100])

    def round(self, report: RoundReport, queries: int) -> None:
        """Log its mean loss."""
        self._client.log_metric(self._id, "mean_loss", report.mean_loss, step=queries)

    def metric(self, name: str, value: float, queries: int) -> None:
        """Log a point of the curve."""
        self._client.log_metric(self._id, f"dev_{name}", value, step=queries)

    def end(self, result: RunResult | None) -> None:
        """Log the final numbers; the prompt and the result as files."""
        if result is None:
            self._client.set_terminated(self._id, status="KILLED")
            return
        for name, value in summary_of(result).items():
            self._client.log_metric(self._id, name, value, step=result.spent.queries)
        self._client.log_text(self._id, result.prompt.text, "prompt.txt")
        self._client.log_dict(self._id, result.model_dump(mode="json"), "result.json")
        ends = {"failed": "FAILED", "stopped": "KILLED"}
        self._client.set_terminated(self._id, status=ends.get(result.status, "FINISHED"))

    def _experiment(self) -> str:
        given = os.environ.get("MLFLOW_EXPERIMENT_ID")
        if given:
            return given
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "fedone")
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found else self._client.create_experiment(name))
