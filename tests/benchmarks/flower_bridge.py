"""Cost of a round through Flower and through our aggregator: the same run, without a model.

bash scripts/test-flower --collect-only   # makes the environment
PYTHONPATH=. .venv-flower/bin/python tests/benchmarks/flower_bridge.py --nodes 10 --rounds 50
"""

# mypy: ignore-errors
from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import tempfile
import time
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from statistics import median

from flwr.app import Context, Message
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from fedone_sdk.flower import FedOneStrategy, client_app, node_shard
from fedone_sdk.local import Federation, simulate
from fedone_sdk.testing import ScriptedBackend
from tests.flower.federations import federation


class Timed(FedOneStrategy):
    """Records the end of each round."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.ended: list[float] = []

    def aggregate_train(self, server_round: int, replies: Iterable[Message]):
        """Aggregate, and record the time."""
        arrays, metrics = super().aggregate_train(server_round, replies)
        if arrays is not None:
            self.ended.append(time.perf_counter())
        return arrays, metrics


def through_flower(wanted: Federation, nodes: int) -> tuple[list[float], str]:
    """Return the ends of rounds in Flower's simulation engine, and the digest of alpha."""
    strategy = Timed(wanted.spec, wanted.vocabulary, backend=ScriptedBackend())
    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        strategy.start(grid)

    run_simulation(
        server_app=server,
        client_app=client_app(lambda context: node_shard(wanted, context)),
        num_supernodes=nodes,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )
    return strategy.ended, strategy.run_result.alpha_sha256


def through_ours(wanted: Federation, transport: str) -> tuple[list[float], str]:
    """Return the same from our simulation."""
    ended: list[float] = []

    def watch(run, change) -> None:
        if change is not None and change.finished is not None:
            ended.append(time.perf_counter())

    result = asyncio.run(
        simulate(wanted, backend=ScriptedBackend(), transport=transport, watch=watch)
    )
    return ended, result.alpha_sha256


def main() -> None:
    """Print the median and the 95th percentile of a round."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=50)
    args = parser.parse_args()
    os.environ.update(FLWR_TELEMETRY_ENABLED="0", RAY_USAGE_STATS_ENABLED="0")
    print(f"flwr {version('flwr')}, ray {version('ray')}")
    for exchange in ("losses", "alpha"):
        method = {"name": "gs-bdpl", "num_samples": 10, "batch_size": 8}
        wanted = federation(
            Path(tempfile.mkdtemp()),
            method=method,
            data={"train": "rows.jsonl", "num_clients": args.nodes, "shots": 4},
            participation={"exchange": exchange},
            rounds=args.rounds,
        )
        ways = {
            "Flower, simulated": lambda wanted=wanted: through_flower(wanted, args.nodes),
            "ours, HTTP": lambda wanted=wanted: through_ours(wanted, "http"),
            "ours, in memory": lambda wanted=wanted: through_ours(wanted, "memory"),
        }
        for name, way in ways.items():
            ended, digest = way()
            took = sorted(1e3 * (b - a) for a, b in itertools.pairwise(ended))
            p95 = took[int(0.95 * len(took))]
            print(f"{exchange} | {name} | {median(took):.1f} ms | {p95:.1f} ms | {digest[:12]}")


if __name__ == "__main__":
    main()
