"""The ClientApp: a node has its rows and a model; neither texts nor labels leave it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedone_flower.task import TASK, shard
from fedone_sdk import OnnxBackend, TaskSpec
from fedone_sdk.backends import LLMBackend, predict
from fedone_sdk.data import draw_minibatch, load_examples
from fedone_sdk.task import Example

_MAX_PROMPTS, _MAX_ROWS = 64, 256
"""Maximum number of prompts and of rows in one message of the server."""


def client_app(
    task: TaskSpec,
    examples: Callable[[Context], Sequence[Example]],
    backend: Callable[[], LLMBackend],
) -> ClientApp:
    """Return a ClientApp that scores prompts on a node's rows, with a model on the node.

    Args:
        task: The task.
        examples: Returns the rows of a node.
        backend: Creates the model, for one message.
    """
    app = ClientApp()

    @app.train()
    def score(message: Message, context: Context) -> Message:
        work = message.content.config_records["work"]
        prompts, size, seed = work["prompts"], work["batch-size"], work["seed"]
        if not (isinstance(prompts, list) and isinstance(size, int) and isinstance(seed, int)):
            raise ValueError("the message is not one of FedOneStrategy")
        if not (len(prompts) <= _MAX_PROMPTS and 1 <= size <= _MAX_ROWS):
            raise ValueError("the message asks for too much")
        rows = examples(context)
        drawn = [rows[row] for row in draw_minibatch(len(rows), min(size, len(rows)), seed)]
        losses = asyncio.run(_losses(task, [str(prompt) for prompt in prompts], drawn, backend()))
        record = RecordDict({"losses": MetricRecord({"losses": losses})})
        return Message(record, reply_to=message)

    return app


async def _losses(
    task: TaskSpec, prompts: list[str], rows: list[Example], backend: LLMBackend
) -> list[float]:
    async with backend as model:
        found = [await predict(model, task, prompt, rows, len(rows)) for prompt in prompts]
    return [one.mean_loss if one.mean_loss is not None else float("nan") for one in found]


def _rows(context: Context) -> Sequence[Example]:
    """Return a node's rows: its file (``--node-config 'data="rows.jsonl"'``), or a shard."""
    config = context.node_config
    if "data" in config:
        return list(load_examples(str(config["data"])))
    return shard(int(config["partition-id"]), int(config["num-partitions"]))


app = client_app(TASK, _rows, OnnxBackend)
