"""Each tracker with its real package, which reads the data again.

Run by scripts/test-trackers, which installs them.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedone_sdk.reports import artefact_of, mlflow_prompt
from fedone_sdk.trackers import Tracking, find_tracker
from tests.integration.tuned import Tuned, tuned
from tests.pages import blocks

PAGE = Path(__file__).resolve().parents[2] / "docs/guides/reports.md"

# Their own deprecations are theirs.
pytestmark = pytest.mark.filterwarnings("default")


async def track(name: str) -> Tuned:
    with Tracking({name: find_tracker(name)}) as tracking:
        done = await tuned(watch=tracking)
        tracking.end(done.result)
    return done


async def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason="scripts/test-trackers installs mlflow")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "ours")
    monkeypatch.chdir(tmp_path)
    done = await track("mlflow")
    from mlflow.tracking import MlflowClient

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("ours")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("small", "FINISHED")
    assert run.data.params["method.name"] == "gs-bdpl"
    assert run.data.metrics["spent_queries"] == done.result.spent.queries
    assert run.data.metrics["accuracy_after"] == done.result.metric.after
    losses = client.get_metric_history(run.info.run_id, "mean_loss")
    assert [(point.step, point.value) for point in losses] == [
        (4 * (entry.round + 1), entry.mean_loss) for entry in done.result.history
    ]
    dev = client.get_metric_history(run.info.run_id, "dev_accuracy")
    assert [point.step for point in dev] == [16, 32]
    client.download_artifacts(run.info.run_id, "", str(tmp_path))
    assert (tmp_path / "prompt.txt").read_text() == done.result.prompt.text
    written = json.loads((tmp_path / "result.json").read_text())
    assert written == done.result.model_dump(mode="json")


async def test_mlflow_that_cannot_be_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("mlflow", reason="scripts/test-trackers installs mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:secret-word@127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.chdir(tmp_path)
    done = await track("mlflow")
    assert done.result.status == "completed"
    said = capsys.readouterr().out
    assert "a tracker failed" in said
    assert "secret-word" not in said


async def test_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboardX", reason="scripts/test-trackers installs tensorboardX")
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator",
        reason="scripts/test-trackers installs tensorboard",
    )
    monkeypatch.setenv("TENSORBOARD_LOGDIR", str(tmp_path / "board"))
    done = await track("tensorboard")
    events: Any = accumulator.EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    losses = [(point.step, point.value) for point in events.Scalars("train/mean_loss")]
    assert [step for step, _ in losses] == [4 * (e.round + 1) for e in done.result.history]
    assert [value for _, value in losses] == pytest.approx(
        [entry.mean_loss for entry in done.result.history], rel=1e-6
    )
    assert [point.step for point in events.Scalars("dev/accuracy")] == [16, 32]
    (final,) = events.Scalars("final/accuracy_after")
    assert final.value == pytest.approx(done.result.metric.after)
    (text,) = events.Tensors("prompt/text_summary")
    assert done.result.prompt.text in text.tensor_proto.string_val[0].decode()


async def test_tensorboard_writes_where_summary_writer_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboardX", reason="scripts/test-trackers installs tensorboardX")
    monkeypatch.delenv("TENSORBOARD_LOGDIR", raising=False)
    monkeypatch.chdir(tmp_path)
    await track("tensorboard")
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.endswith("-small")
    assert list(folder.glob("events.out.tfevents.*"))


def records(file: bytes) -> Iterator[bytes]:
    """The records of W&B's file: LevelDB's log format, after a header of 7 bytes."""
    parts = b""
    at = 7
    while at + 7 <= len(file):
        if 32_768 - at % 32_768 < 7:  # what is left of a block holds no more
            at += 32_768 - at % 32_768
            continue
        _, size, kind = struct.unpack_from("<IHB", file, at)
        parts += file[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            yield parts
            parts = b""


def values(items: Any) -> dict[str, Any]:
    return {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}


async def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="scripts/test-trackers installs wandb")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.delenv("WANDB_MODE", raising=False)  # offline is our default
    done = await track("wandb")
    wandb.teardown()  # as a process does that ends: W&B writes the rest only now
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    (file,) = folder.glob("run-*.wandb")
    from wandb.proto import wandb_internal_pb2

    rows: list[dict[str, Any]] = []
    summary: dict[str, Any] = {}
    project = ""
    for data in records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            project = project or record.run.project
        elif kind == "history":
            rows.append(values(record.history.item))
        elif kind == "summary":
            summary |= values(record.summary.update)
    assert project == "fedone"
    losses = [(row["queries"], row["mean_loss"]) for row in rows if "mean_loss" in row]
    assert losses == [(4 * (e.round + 1), e.mean_loss) for e in done.result.history]
    assert [row["measured_at"] for row in rows if "dev_accuracy" in row] == [16, 32]
    assert summary["prompt"] == done.result.prompt.text
    assert summary["accuracy_after"] == done.result.metric.after


async def test_mlflow_registers_the_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="scripts/test-trackers installs mlflow")
    monkeypatch.chdir(tmp_path)
    for choose in (mlflow.set_tracking_uri, mlflow.set_registry_uri):
        choose(f"sqlite:///{tmp_path}/mlflow.db")
    artefact = artefact_of((await tuned()).run)
    document = json.loads(json.dumps(mlflow_prompt(artefact)))
    mlflow.genai.register_prompt(**json.loads(json.dumps(document)))  # It adds to the tags.
    found = mlflow.genai.load_prompt(f"prompts:/{artefact.name}/1")
    assert found.variables == {"text"}
    assert found.format(text="A {{text}} film.") == (
        f"{artefact.prompt.text} A {{{{text}}}} film. It was"
    )
    assert found.commit_message == document["commit_message"]
    assert found.tags.items() >= document["tags"].items()
    mlflow.set_registry_uri("")  # MLflow keeps them in this process.
    mlflow.set_tracking_uri(None)


async def test_dspy_takes_the_prompt_from_the_artefact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dspy = pytest.importorskip("dspy", reason="scripts/test-trackers installs dspy")
    artefact = artefact_of((await tuned()).run)
    (tmp_path / "sst2.prompt.json").write_text(artefact.dump())
    (program,) = [one for one in blocks(PAGE.read_text()) if one.info == "dspy"]
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {}
    exec(program.text, scope)
    assert isinstance(scope["program"], dspy.Predict)
    instructions = scope["program"].signature.instructions
    assert artefact.prompt.text.strip() in instructions
    assert "exactly one of: terrible, great" in instructions
