"""The ServerApp: it tunes a prompt under a cap, and measures it on the server's dev rows."""

from __future__ import annotations

import asyncio

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedone_flower.strategy import FedOneStrategy
from fedone_flower.task import POSITIONS, TASK, WORDS, split
from fedone_sdk import OnnxBackend
from fedone_sdk.algorithms import Space, make_method
from fedone_sdk.backends import predict

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Tune the prompt, and print it with its accuracy."""
    config = context.run_config
    space = Space.repeated(POSITIONS, len(WORDS))
    method = make_method("thompson", space=space, num_samples=8, seed=0)
    strategy = FedOneStrategy(
        method, WORDS, max_queries=int(config["queries"]), min_nodes=int(config["nodes"])
    )
    strategy.tune(grid)
    before, after = (asyncio.run(_accuracy(text)) for text in ("", strategy.prompt))
    print(f"prompt {strategy.prompt!r}, {strategy.spent} queries")
    print(f"accuracy: {before:.3f} without, {after:.3f} with it")


async def _accuracy(prompt: str) -> float:
    async with OnnxBackend() as model:
        return (await predict(model, TASK, prompt, split("dev"), 16)).metric or 0.0
