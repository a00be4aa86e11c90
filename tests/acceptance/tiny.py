"""A run of a second on the embedded model, and the sentences that come with the SDK."""

from __future__ import annotations

from pathlib import Path

from fedone_sdk import assets
from fedone_sdk.messages import RunResult

RUN = """\
name: tiny
task: {template: "{prompt} {text} It was {mask}.", labels: {0: " terrible", 1: " great"}}
data: {train: train.jsonl, dev: dev.jsonl, num_clients: 4, shots: 3}
prompt: {length: 3, vocabulary: {kind: list, candidates: [" good", " bad", " really", " so"]}}
method:
  {name: gs-bdpl, num_samples: 4, batch_size: 4, optimizer: sgd, learning_rate: 0.01,
   alpha_min: 0.01}
budget: {queries: 16}
rounds: 4
evaluation: {every: 2}
"""


def write_sentences(folder: Path, *, train: int = 40, dev: int = 16) -> None:
    """Write the first rows of both splits of the companion feedback."""
    for name, count in ("train", train), ("dev", dev):
        file = assets.path("companion_feedback") / f"{name}.jsonl"
        lines = file.read_text().splitlines(keepends=True)[:count]
        (folder / f"{name}.jsonl").write_text("".join(lines))


def result_in(file: Path | str) -> RunResult:
    """Return the result that `fedone tune --json` wrote."""
    return RunResult.model_validate_json(Path(file).read_bytes())
