"""Searches over slots, on tables of real answers to all combinations of candidates.

    python -m tests.benchmarks.slots --run --report
    python -m tests.benchmarks.slots --build gemma-sst2 --tables FOLDER --gemma FILE --sst2 FOLDER

The first command runs the SDK's methods on the tables of docs/benchmarks/slot-tables, with its
partitions, mini-batches and losses by class. Finished trials are stored, so an interrupted command
resumes; mini-batches of another size need another `--trials` file. The second command makes a
table: it queries a model once for every combination of a cell's candidates (10 minutes to an hour
on one core).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedone_sdk.algorithms.registry import METHODS
from fedone_sdk.backends.local_models import local_model, model_file
from tests.benchmarks.slot_cells import CELLS, Place
from tests.benchmarks.slot_report import report
from tests.benchmarks.slot_runs import (
    CONTESTANTS,
    TABLES,
    Contestant,
    Federation,
    Table,
    pilots,
    trial,
)
from tests.benchmarks.slot_tables import build

BUDGETS = (50, 100, 200, 300, 1000)
PARTITIONS: dict[str, dict[str, Any]] = {
    "iid": {},
    "dirichlet": {"alpha": 0.1},
    "liars": {"liars": 2},
}
CLIENTS = 8
SHARED = Path(os.environ.get("FEDONE_SHARED", Path(__file__).parents[3] / "shared"))
PILOT = 9001
"""The first of the seeds used to choose settings."""


def main() -> None:
    """Build tables, run trials, write the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", type=Path, default=TABLES, help="where they are")
    parser.add_argument("--build", choices=CELLS, nargs="*", default=[])
    parser.add_argument("--threads", type=int, help="of llama.cpp; one per core by default")
    smollm2 = model_file(local_model("smollm2-135m-instruct"))
    parser.add_argument("--smollm2", type=Path, default=smollm2)
    parser.add_argument("--gemma", type=Path, default=Path("gemma3-270m.gguf"))
    parser.add_argument("--sst2", type=Path, default=SHARED / "data" / "glue" / "sst2")
    parser.add_argument("--corpora", type=Path, default=Path("site-packages"))
    parser.add_argument("--run", action="store_true", help="run the trials that are missing")
    parser.add_argument("--report", action="store_true", help="print Markdown")
    parser.add_argument("--pilot", action="store_true", help="run settings of the policies")
    parser.add_argument("--cells", nargs="*", help="tables; all that are there by default")
    parser.add_argument("--methods", nargs="*", choices=CONTESTANTS, default=[*CONTESTANTS])
    parser.add_argument("--partitions", nargs="*", choices=PARTITIONS, default=["iid", "dirichlet"])
    parser.add_argument("--budgets", nargs="*", type=int, default=[*BUDGETS])
    parser.add_argument("--batch", type=int, default=16, help="rows of a mini-batch, at most")
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--default", choices=CONTESTANTS, default="thompson")
    parser.add_argument("--trials", type=Path, default=Path("slot-trials.jsonl"), help="JSON lines")
    args = parser.parse_args()
    place = Place(smollm2=args.smollm2, gemma=args.gemma, sst2=args.sst2, corpora=args.corpora)
    for name in args.build:
        build(name, CELLS[name], place, args.tables, threads=args.threads)
    if not (args.run or args.report or args.pilot):
        return
    names = args.cells or [name for name in CELLS if (args.tables / f"{name}.npz").is_file()]
    tables = [Table(args.tables / f"{name}.npz") for name in names]
    if args.pilot:
        _pilot(tables, args.budgets, args.partitions, args.batch)
    if args.run:
        seeds = range(args.seeds)
        # Seeds vary slowest, so an interrupted run has complete pairs.
        wanted = itertools.product(seeds, tables, args.partitions, args.methods, args.budgets)
        _run(args.trials, wanted, args.batch)
    if args.report:
        lines = report(
            tables,
            [one for one in _trials(args.trials) if one["seed"] < args.seeds],
            budgets=args.budgets,
            methods=args.methods,
            default=args.default,
        )
        print("\n".join(lines))


def _trials(file: Path) -> list[dict[str, Any]]:
    """Return the trials of a file, without an incomplete last line."""
    if not file.is_file():
        return []
    found = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def _run(file: Path, wanted: Iterator[tuple[int, Table, str, str, int]], batch: int) -> None:
    names = ("cell", "partition", "method", "queries", "seed")
    known = {tuple(one[name] for name in names) for one in _trials(file)}
    with file.open("a", encoding="utf-8") as out:
        for seed, table, partition, method, queries in wanted:
            if CONTESTANTS[method].name not in (*METHODS, "once"):
                continue
            key = (table.name, partition, method, queries, seed)
            if key in known:
                continue
            start = time.monotonic()
            federation = _federation(table, partition, seed, batch)
            found = trial(CONTESTANTS[method], federation, queries)
            del found["pairs"]  # Thousands, for one line.
            took = round(time.monotonic() - start, 2)
            line = {**dict(zip(names, key, strict=True)), **found, "wall_s": took}
            out.write(json.dumps(line) + "\n")
            out.flush()


def _federation(table: Table, partition: str, seed: int, batch: int) -> Federation:
    return Federation(
        table=table, clients=CLIENTS, batch_size=batch, seed=seed, **PARTITIONS[partition]
    )


def _pilot(tables: list[Table], budgets: list[int], partitions: list[str], batch: int) -> None:
    """Print the mean share of the gap that policies close, over tables and four seeds."""
    for name, one in pilots().items():
        shares = [_piloted(one, tables, partitions, queries, batch) for queries in budgets]
        print(name, *(f"{share:.0f}" for share in shares), flush=True)


def _piloted(
    contestant: Contestant, tables: list[Table], partitions: list[str], queries: int, batch: int
) -> float:
    shares: list[float] = []
    for table, partition, seed in itertools.product(tables, partitions, range(4)):
        federation = _federation(table, partition, PILOT + seed, batch)
        none, oracle = table.best(table.none).loss, table.best(table.oracle).loss
        found = float(trial(contestant, federation, queries)["best_loss"])
        shares.append(100 * (none - found) / (none - oracle))
    return sum(shares) / len(shares)


if __name__ == "__main__":
    main()
