"""Cost of simulated clients: start, time per round and memory, for 100 to 10,000 clients.

    python tests/benchmarks/simulation.py [--clients 100 1000 10000] [--rounds 200] [--repeats 5]

One trivial client per round: it scores two prompts on one example through the gateway, whose model
answers at once. Alpha is 20 x 200 float32. `flower_simulation.py` measures Flower in the same
setting.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time

import structlog

from fedone_sdk.aggregator import ServedRun
from fedone_sdk.aggregator.runs.changes import Change
from fedone_sdk.local import Federation, simulate
from fedone_sdk.spec import RunSpec
from fedone_sdk.testing import ScriptedBackend
from fedone_sdk.vocabulary import Vocabulary

LENGTH, WORDS = 20, 200


def main() -> None:
    """Measure each setting repeatedly, in separate processes, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[100, 1000, 10_000])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--one", choices=["alpha", "losses"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
        print(json.dumps(asyncio.run(measure(args.clients[0], args.rounds, args.one))))
        return
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}\n")
    columns = ["start_s", "start_cpu_s", "round_p50_ms", "round_p95_ms", "round_cpu_ms", "rss_mb"]
    print(f"| clients | exchange | {' | '.join(columns)} |\n|{'---|' * (2 + len(columns))}")
    for num_clients in args.clients:
        for exchange in ("alpha", "losses"):
            command = [sys.executable, __file__, "--one", exchange]
            command += ["--clients", str(num_clients), "--rounds", str(args.rounds)]
            found = [
                json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
                for _ in range(args.repeats)
            ]
            # The least, because interference only adds time.
            least = [f"{min(one[name] for one in found):.4g}" for name in columns]
            print(f"| {num_clients} | {exchange} | {' | '.join(least)} |", flush=True)


async def measure(num_clients: int, rounds: int, exchange: str) -> dict[str, float]:
    """Simulate once; the start ends with the first round."""
    ended: list[tuple[float, float]] = []

    def watch(run: ServedRun, change: Change | None) -> None:
        if change is not None and change.finished is not None:
            ended.append((time.perf_counter(), time.process_time()))

    federation = federation_of(num_clients, rounds, exchange)
    began, began_cpu = time.perf_counter(), time.process_time()
    result = await simulate(federation, backend=ScriptedBackend(), watch=watch)
    assert result.status == "completed", result
    took = sorted(after[0] - before[0] for before, after in itertools.pairwise(ended))
    busy = [after[1] - before[1] for before, after in itertools.pairwise(ended)]
    return {
        "start_s": ended[0][0] - began,
        "start_cpu_s": ended[0][1] - began_cpu,
        "round_p50_ms": 1e3 * statistics.median(took),
        "round_p95_ms": 1e3 * took[int(0.95 * len(took))],
        "round_cpu_ms": 1e3 * statistics.median(busy),
        "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def federation_of(num_clients: int, rounds: int, exchange: str) -> Federation:
    """Return clients with one example each."""
    spec = RunSpec.model_validate(
        {
            "name": "benchmark",
            "task": {"template": "{prompt} {text} {mask}", "labels": {0: " no", 1: " yes"}},
            "data": {"train": "none.jsonl", "num_clients": num_clients},
            "prompt": {"length": LENGTH, "vocabulary": {"kind": "list", "candidates": ["a", "b"]}},
            "method": {"name": "gs-bdpl", "num_samples": 2, "batch_size": 1, "optimizer": "sgd"},
            "participation": {"exchange": exchange},
            "rounds": rounds,
            "evaluation": {"every": 0},
        }
    )
    return Federation(
        spec=spec,
        shards=tuple(({"text": f"text {k}", "label": k % 2},) for k in range(num_clients)),
        dev=(),
        vocabulary=Vocabulary(candidates=tuple(f" word{n}" for n in range(WORDS))),
        reused_rows=False,
    )


if __name__ == "__main__":
    main()
