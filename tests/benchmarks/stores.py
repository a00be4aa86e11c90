"""Cost of a commit: SQLite and PostgreSQL, one run and 64 concurrent ones.

A commit is that of an update of the quickstart: 4 kB of state, 16 kB of arrays, a line of the log,
closed work, and a signal. `alone` gives each write to SQLite its own transaction.

    python -m tests.benchmarks.stores [--seconds 5] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import platform
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from fedone_sdk.stores import ClosedWork, Commit, LogEntry, RunRecord, SqlStore
from fedone_sdk.stores.sql import sqlite
from tests.postgres import cluster


def main() -> None:
    """Measure every setting and print Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--folder", type=Path, help="where the SQLite files are put")
    args = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}\n")
    columns = ["store", "runs at once", "commits/s", "p50 of a commit, ms", "p99 of a commit, ms"]
    columns += ["CPU time per commit, ms"]
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for num_runs in (1, 64):
        for label, batch in (("sqlite, separate transactions", 1), ("sqlite", sqlite._MAX_BATCH)):
            with tempfile.TemporaryDirectory(dir=args.folder) as folder, batches_of(batch):
                url = f"sqlite:///{folder}/fedone.db"
                print(label, asyncio.run(measure(url, num_runs, args.seconds)), sep="")
    with cluster() as server:
        for num_runs in (1, 64):
            for label, signal in (("postgresql, no signal", None), ("postgresql", "s" * 120)):
                url = server.url(server.create())
                row = asyncio.run(measure(url, num_runs, args.seconds, signal=signal))
                print(label, row, sep="")


@contextlib.contextmanager
def batches_of(size: int) -> Iterator[None]:
    """Let up to `size` writes share a transaction."""
    usual, sqlite._MAX_BATCH = sqlite._MAX_BATCH, size
    try:
        yield
    finally:
        sqlite._MAX_BATCH = usual


@contextlib.asynccontextmanager
async def opened(url: str) -> AsyncIterator[SqlStore]:
    """Open a store for the duration of the block."""
    store = SqlStore.at(url)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


async def measure(url: str, num_runs: int, seconds: float, *, signal: str | None = None) -> str:
    """Commit to each run repeatedly; return the rest of the table's row."""
    latencies: list[float] = []

    async def commit_on_and_on(store: SqlStore, run_id: str) -> None:
        for version in range(10**9):
            now = time.perf_counter()
            if now > end and version > 1:  # Quantiles need two commits.
                return
            work = ClosedWork(
                assignment_id=f"{run_id}/{version}",
                run_id=run_id,
                client_index=version % 4,
                outcome="accepted",
                body_sha256="ab" * 32,
                receipt='{"round": 1}',
            )
            commit = Commit(
                document="d" * 4000,
                arrays=os.urandom(16_000),
                closed=(work,),
                log=(LogEntry(kind="round", body="b" * 800),),
                signal=signal,
            )
            await store.commit(run_id, version, commit)
            latencies.append(time.perf_counter() - now)

    async with opened(url) as store:
        runs = [f"run-{number}" for number in range(num_runs)]
        for run_id in runs:
            await store.add_run(
                RunRecord(
                    run_id=run_id,
                    spec="",
                    candidates="",
                    document="",
                    arrays=b"",
                    version=0,
                    created_at=0.0,
                )
            )
        cpu, start = time.process_time(), time.perf_counter()
        end = start + seconds
        async with asyncio.TaskGroup() as group:
            for run_id in runs:
                group.create_task(commit_on_and_on(store, run_id))
        elapsed, cpu = time.perf_counter() - start, time.process_time() - cpu
    p50, *_, p99 = (statistics.quantiles(latencies, n=100)[i] * 1e3 for i in (49, 98))
    per_second, each = len(latencies) / elapsed, cpu / len(latencies) * 1e3
    return f" | {num_runs} | {per_second:.0f} | {p50:.1f} | {p99:.1f} | {each:.2f} |"


if __name__ == "__main__":
    main()
