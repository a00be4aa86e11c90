"""The built-in trackers: MLflow, TensorBoard, and Weights & Biases."""

from __future__ import annotations

import os
from typing import Any

from fedone_sdk.messages import RoundReport, RunResult
from fedone_sdk.trackers.tracker import TrackedRun, summary_of


class MlflowTracker:
    """Writes to ``MLFLOW_TRACKING_URI``, experiment ``MLFLOW_EXPERIMENT_NAME`` (or ``fedone``).

    Sets ``MLFLOW_DISABLE_TELEMETRY=true``, unless the variable already has a value.
    """

    def __init__(self, run: TrackedRun) -> None:
        # MLflow reads the variable when it is imported.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        self._client: Any = MlflowClient()
        self._id = self._client.create_run(
            self._experiment(), run_name=run.name, tags={"fedone.run_id": run.run_id}
        ).info.run_id
        params = [Param(name, str(value)) for name, value in run.params.items()]
        for at in range(0, len(params), 100):  # MLflow's limit per request.
            self._client.log_batch(self._id, params=params[at : at + 100])

    def round(self, report: RoundReport, queries: int) -> None:
        """Log the round's mean loss."""
        self._client.log_metric(self._id, "mean_loss", report.mean_loss, step=queries)

    def metric(self, name: str, value: float, queries: int) -> None:
        """Log a point of the curve."""
        self._client.log_metric(self._id, f"dev_{name}", value, step=queries)

    def end(self, result: RunResult | None) -> None:
        """Log the final numbers, and write the prompt and the result to files of the run."""
        if result is None:
            self._client.set_terminated(self._id, status="KILLED")
            return
        for name, value in summary_of(result).items():
            self._client.log_metric(self._id, name, value, step=result.spent.queries)
        self._client.log_text(self._id, result.prompt.text, "prompt.txt")
        # The JSON also contains the prompt's label bias and label words.
        self._client.log_dict(self._id, result.prompt.model_dump(mode="json"), "prompt.json")
        self._client.log_dict(self._id, result.model_dump(mode="json"), "result.json")
        ends = {"failed": "FAILED", "stopped": "KILLED"}
        self._client.set_terminated(self._id, status=ends.get(result.status, "FINISHED"))

    def _experiment(self) -> str:
        if experiment_id := os.environ.get("MLFLOW_EXPERIMENT_ID"):
            return experiment_id
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "fedone")
        experiment = self._client.get_experiment_by_name(name)
        return str(experiment.experiment_id if experiment else self._client.create_experiment(name))


class TensorboardTracker:
    """Writes to the folder ``TENSORBOARD_LOGDIR``, by default ``runs/DATE_HOST-NAME``."""

    def __init__(self, run: TrackedRun) -> None:
        from tensorboardX import SummaryWriter

        self._writer: Any = SummaryWriter(
            os.environ.get("TENSORBOARD_LOGDIR"), comment=f"-{run.name}"
        )
        table = "".join(f"    {name}: {value}\n" for name, value in run.params.items())
        self._writer.add_text("run", f"    run_id: {run.run_id}\n{table}", 0)

    def round(self, report: RoundReport, queries: int) -> None:
        """Log the round's mean loss."""
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
            prompt = result.prompt
            lines = [*prompt.text.splitlines(), "", prompt.model_dump_json(exclude={"text"})]
            text = "\n".join(f"    {line}" for line in lines)
            self._writer.add_text("prompt", text, result.spent.queries)
        self._writer.close()


class WandbTracker:
    """Writes to ``WANDB_DIR``, in the project ``WANDB_PROJECT`` (or ``fedone``).

    By default the run is recorded offline, and ``wandb sync`` sends it later. With
    ``WANDB_MODE=online`` it is sent at once.
    """

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        mode: Any = os.environ.get("WANDB_MODE", "offline")
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "fedone"),
            name=run.name,
            config={**run.params, "run_id": run.run_id},
            mode=mode,
            # The console output is not recorded.
            settings=wandb.Settings(console="off", silent=True),
        )

    def round(self, report: RoundReport, queries: int) -> None:
        """Log the round's mean loss."""
        self._run.log({"mean_loss": report.mean_loss, "round": report.round, "queries": queries})

    def metric(self, name: str, value: float, queries: int) -> None:
        """Log a point of the curve; later rounds may have been logged before it."""
        self._run.log({f"dev_{name}": value, "measured_at": queries})

    def end(self, result: RunResult | None) -> None:
        """Log the final numbers and the prompt in the run's summary."""
        if result is None:
            self._run.finish(exit_code=1)
            return
        prompt = {"prompt": result.prompt.text, "prompt_bias": result.prompt.bias}
        self._run.summary.update({**summary_of(result), **prompt, "status": result.status})
        self._run.finish(exit_code=int(result.status == "failed"))
