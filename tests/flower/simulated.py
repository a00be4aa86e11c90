"""The example's strategy and ClientApp in Flower's simulation engine: a program of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from fedone_flower.client_app import client_app
from fedone_flower.strategy import FedOneStrategy
from fedone_flower.task import TASK, WORDS, shard
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from fedone_sdk.backends import LLMBackend
from fedone_sdk.testing import ScriptedBackend
from tests.flower.searches import BATCH, QUERIES, search

NODES = 4


def model() -> LLMBackend:
    """A model for one message."""
    return ScriptedBackend()


def main(folder: Path, name: str) -> None:
    """Tune, and write the result. All nodes have the same rows, so their draw does not matter."""
    strategy = FedOneStrategy(
        search(name), WORDS, max_queries=QUERIES, batch_size=BATCH, min_nodes=NODES
    )
    server = ServerApp()

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        strategy.tune(grid, timeout=180.0)  # A Ray that did not start never answers.

    run_simulation(
        server_app=server,
        client_app=client_app(TASK, lambda context: shard(0, 8), model),
        num_supernodes=NODES,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )
    found = {
        "alpha_sha256": strategy.alpha_sha256,
        "prompt": strategy.prompt,
        "spent": strategy.spent,
    }
    (folder / "result.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
