"""Flower's simulation engine, for comparison with `simulation.py`: start, time per round, memory.

In a separate environment:

    python -m venv VENV && VENV/bin/pip install 'flwr[simulation]==1.41.0'
    VENV/bin/python tests/benchmarks/flower_simulation.py --clients 100 1000 10000

FedAvg selects one client per round, which gets a 20x200 float32 matrix and returns it.
"""

# mypy: ignore-errors
from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterable
from importlib.metadata import version
from statistics import median

import numpy as np
import psutil
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

SHAPE = (20, 200)


class Timed(FedAvg):
    """FedAvg that records the end of each round."""

    def __init__(self, num_clients: int, rounds: int) -> None:
        super().__init__(
            # One client: `max(int(fraction * nodes), min_train_nodes)`.
            fraction_train=0.5 / num_clients,
            fraction_evaluate=0.0,
            min_train_nodes=1,
            min_available_nodes=num_clients,
        )
        self.rounds = rounds
        self.ended: list[float] = []
        self.memory_mb = 0.0

    def aggregate_train(self, server_round: int, replies: Iterable[Message]):
        """Aggregate, and record the time."""
        replies = list(replies)
        if len(replies) != 1 or replies[0].has_error():
            raise RuntimeError(f"round {server_round}: {len(replies)} replies")
        result = super().aggregate_train(server_round, replies)
        self.ended.append(time.perf_counter())
        if server_round == self.rounds:  # It is slow, so only after the last round.
            self.memory_mb = memory_mb()
        return result


def memory_mb() -> float:
    """Return the resident memory of this process and Ray's; shared pages count once (PSS)."""
    me = psutil.Process()
    everybody = [me, *me.children(recursive=True)]
    return sum(process.memory_full_info().pss for process in everybody) / 2**20


def train(message: Message, context: Context) -> Message:
    """Return the message's arrays."""
    content = RecordDict(
        {"arrays": message.content["arrays"], "metrics": MetricRecord({"num-examples": 1})}
    )
    return Message(content=content, reply_to=message)


def measure(num_clients: int, rounds: int) -> dict[str, float]:
    """One simulation."""
    strategy = Timed(num_clients, rounds)
    server, client = ServerApp(), ClientApp()
    client.train()(train)

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        strategy.start(
            grid=grid,
            initial_arrays=ArrayRecord([np.zeros(SHAPE, dtype=np.float32)]),
            num_rounds=rounds,
        )

    began = time.perf_counter()
    run_simulation(server_app=server, client_app=client, num_supernodes=num_clients)
    ended = strategy.ended
    assert len(ended) == rounds, ended
    took = sorted(after - before for before, after in itertools.pairwise(ended))
    return {
        "start_s": round(ended[0] - began, 3),
        "round_p50_ms": round(1e3 * median(took), 2),
        "round_p95_ms": round(1e3 * took[int(0.95 * len(took))], 2),
        "memory_mb": round(strategy.memory_mb, 1),
    }


def main() -> None:
    """Measure each number of clients in separate processes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[100, 1000, 10_000])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.clients[0], args.rounds)))
        return
    print(f"flwr {version('flwr')}, ray {version('ray')}, {args.rounds} rounds")
    for num_clients in args.clients:
        for _ in range(args.repeats):
            command = [sys.executable, __file__, "--one", "--clients", str(num_clients)]
            done = subprocess.run(
                [*command, "--rounds", str(args.rounds)],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                check=True,
            )
            print(num_clients, done.stdout.strip().splitlines()[-1], flush=True)


if __name__ == "__main__":
    main()
