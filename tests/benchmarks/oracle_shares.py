"""Share of the oracle's gain that a search reaches, on the rows that the oracle searched.

`tests.benchmarks.queries` measures on the dev split, where the oracle gains almost nothing. Here
the prompts of its runs with seed 0 are scored on the rows of all clients, each with the bias of its
run; no prompt and the oracle's prompt have their best bias. Takes a minute on one core.

    python -m tests.benchmarks.oracle_shares --out FOLDER --data glue --model roberta-mini
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from tempfile import TemporaryDirectory

from fedone_sdk.comparison.rows import pooled_rows
from fedone_sdk.experiments.experiment import Workspace
from fedone_sdk.experiments.federated import trial_backend, tuning_federation
from fedone_sdk.experiments.records import Record
from tests.benchmarks.queries.label_rows import LabelRows
from tests.benchmarks.queries.variants import SST2_VARIANTS


def main() -> None:
    """Prints Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="of tests.benchmarks.queries")
    parser.add_argument("--data", type=Path, required=True, help="GLUE's tasks")
    parser.add_argument("--model", type=Path, required=True, help="folder of an ONNX model")
    parser.add_argument("--runs", default="default:500,thompson:500,thompson:2000")
    args = parser.parse_args()
    runs = [tuple(run.split(":")) for run in args.runs.split(",")]
    print("| variant | none | oracle | gap |", *(f"{name} at {mark} |" for name, mark in runs))
    print("|---|---|---|---|" + "---|" * len(runs))
    for variant in SST2_VARIANTS:
        if variant.name == variant.base:
            print(asyncio.run(row(args, variant.name, runs)))


async def row(args: argparse.Namespace, variant: str, runs: list[tuple[str, ...]]) -> str:
    """Return a variant's row; its oracle and its runs must exist."""
    oracle = record(args.out, f"{variant}_oracle")
    with TemporaryDirectory() as folder:
        data = {split: args.data / "sst2" / f"{split}.jsonl" for split in ("train", "dev")}
        workspace = Workspace(inputs={**data, "model": args.model}, folder=Path(folder))
        federation = tuning_federation(oracle.options, workspace)
        task, rows = federation.spec.task, pooled_rows(federation)
        model = oracle.options["run"]["backend"]
        async with trial_backend(model, workspace, keep=False) as backend:
            bare = await LabelRows.ask(backend, task, "", rows)
            best = await LabelRows.ask(backend, task, oracle.result["prompt"], rows)
            none = bare.loss(bare.fitted())
            gap = none - best.loss(best.fitted())
            cells = []
            for name, mark in runs:
                curve = record(args.out, f"{variant}_{name}_s0").result["curve"]
                point = next(point for point in curve if point["mark"] == int(mark))
                found = await LabelRows.ask(backend, task, point["prompt"], rows)
                closed = (none - found.loss(point["bias"])) / gap
                cells.append(f"`{point['prompt']}` {closed:.0%} |")
    return " ".join([f"| {variant} | {none:.4f} | {none - gap:.4f} | {gap:.4f} |", *cells])


def record(out: Path, key: str) -> Record:
    """Return the bench's record of a trial."""
    file = out / "queries" / "trials" / f"{key}.json"
    return Record(**json.loads(file.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
