"""The ClientApp: a node has nothing but its examples."""

from collections.abc import Sequence

from flwr.app import Context

from fedone_sdk.flower import client_app, node_file, node_shard
from fedone_sdk.task import Example


def examples(context: Context) -> Sequence[Example]:
    """Return a node's file (``--node-config 'data="rows.jsonl"'``); in a simulation, a shard."""
    if "data" in context.node_config:
        return node_file(context)
    from fedone_flower.run import configured  # the server's part, which a deployed node needs not

    return node_shard(configured(context.run_config), context)


app = client_app(examples)
