"""A run in Flower's simulation engine, on Ray: a program, so that Ray has a separate process."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from fedone_sdk.flower import FedOneStrategy, client_app, node_shard
from fedone_sdk.testing import ScriptedBackend
from tests.flower import federations


def main(folder: Path, name: str) -> None:
    """Prints the result of the federation `name`."""
    wanted = federations.federation(folder, **getattr(federations, name))
    strategy = FedOneStrategy(
        wanted.spec, wanted.vocabulary, backend=ScriptedBackend(), dev=wanted.dev
    )
    server = ServerApp()

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        strategy.start(grid, timeout=180.0)  # A Ray that did not start never answers.

    run_simulation(
        server_app=server,
        client_app=client_app(lambda context: node_shard(wanted, context)),
        num_supernodes=federations.NODES,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )
    (folder / "result.json").write_text(json.dumps(strategy.run_result.model_dump(mode="json")))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
