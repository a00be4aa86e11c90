"""Cost of a server start: a SQLite store of many ended runs and a few live ones.

One run is run to its end, and stored repeatedly under other names. A start is timed in a separate
process, from opening the store to the first admitted device.

    python -m tests.benchmarks.start [--runs 1000] [--live 3] [--rounds 100] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from fedone_sdk.aggregator import Aggregator, ServedRun
from fedone_sdk.local import Federation, simulate
from fedone_sdk.spec import RunSpec
from fedone_sdk.stores import Commit, MemoryStore, RunRecord, SqlStore, Store
from fedone_sdk.testing import ScriptedBackend
from fedone_sdk.vocabulary import Vocabulary


def main() -> None:
    """Fill a store, start on it and print Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--live", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where the store is put")
    parser.add_argument("--start", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.start is not None:
        print(json.dumps(asyncio.run(started(args.start))))
        return
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}\n")
    print("| ended runs | live runs | rounds each | store MB | listening s | all loaded s |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        store = Path(folder) / "fedone.db"
        asyncio.run(fill(store, args.runs, args.live, args.rounds))
        megabytes = sum(file.stat().st_size for file in Path(folder).iterdir()) / 1e6
        for _ in range(args.repeat):
            command = [sys.executable, "-m", "tests.benchmarks.start", "--start", str(store)]
            updated = subprocess.run(command, check=True, capture_output=True).stdout
            found = json.loads(updated.splitlines()[-1])  # after the lines of the log
            print(
                f"| {args.runs} | {args.live} | {args.rounds} | {megabytes:.0f} "
                f"| {found['listening']:.2f} | {found['loaded']:.2f} |"
            )


def federation_of(rounds: int) -> Federation:
    """Return four clients, and a run of the quickstart's size."""
    spec = RunSpec.model_validate(
        {
            "name": "run",
            "task": {"template": "{prompt} {text} {mask}", "labels": {0: " no", 1: " yes"}},
            "prompt": {"length": 20, "vocabulary": {"kind": "list", "candidates": ["x", "y"]}},
            "method": {"name": "gs-bdpl", "num_samples": 4, "batch_size": 2},
            "participation": {"exchange": "alpha"},
            "rounds": rounds,
            "evaluation": {"every": 0},
        }
    )
    rows = tuple({"text": f"text {number}", "label": number % 2} for number in range(8))
    return Federation(
        spec=spec,
        shards=(rows,) * 4,
        dev=(),
        vocabulary=Vocabulary(candidates=tuple(f" word{number}" for number in range(200))),
        reused_rows=True,
    )


async def played(rounds: int, cut_at: int | None = None) -> tuple[RunRecord, Commit]:
    """Return a run and its log at its end, or at the moment when its process was killed."""
    store, done = MemoryStore(), asyncio.Event()

    def watch(run: ServedRun, _: object) -> None:
        if run.state.round == cut_at:
            done.set()

    playing = asyncio.create_task(
        simulate(federation_of(rounds), backend=ScriptedBackend(), store=store, watch=watch)
    )
    if cut_at is None:
        await playing
    else:
        await done.wait()
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
    record = await store.run("run")
    assert record is not None
    return record, Commit(document=record.document, log=tuple(await store.log("run")))


async def _add(store: Store, run: tuple[RunRecord, Commit], name: str) -> None:
    record, commit = run
    spec = {**json.loads(record.spec), "name": name}
    await store.add_run(replace(record, run_id=name, spec=json.dumps(spec), version=0))
    await store.commit(name, 0, commit)


async def fill(path: Path, runs: int, live: int, rounds: int) -> None:
    """Store an ended run many times, and a live one a few times."""
    ended, going = await played(rounds), await played(rounds, cut_at=rounds // 2)
    store = SqlStore.sqlite(path)
    await store.open()
    try:
        for number in range(runs):
            await _add(store, ended, f"ended-{number}")
        for number in range(live):
            await _add(store, going, f"live-{number}")
    finally:
        await store.close()


async def started(path: Path) -> dict[str, float]:
    """Start on a store, and return the seconds until it listens and until all runs are loaded."""
    began = time.perf_counter()
    aggregator = Aggregator(store=SqlStore.sqlite(path), backend=ScriptedBackend())
    await aggregator.open()
    await aggregator.listen()
    listening = time.perf_counter() - began
    await aggregator.admit_devices()
    loaded = time.perf_counter() - began
    await aggregator.__aexit__(None, None, None)
    return {"listening": listening, "loaded": loaded}


if __name__ == "__main__":
    main()
