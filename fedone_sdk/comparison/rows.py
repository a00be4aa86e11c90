"""The labelled rows of all clients."""

from __future__ import annotations

from fedone_sdk.algorithms import stream_seed
from fedone_sdk.data import draw_minibatch
from fedone_sdk.simulation import Federation
from fedone_sdk.task import Example


def pooled_rows(federation: Federation, count: int | None = None) -> list[Example]:
    """Return rows of all clients, in an order drawn from the run's seed."""
    held = [row for shard in federation.shards for row in shard]
    wanted = len(held) if count is None else count
    drawn = draw_minibatch(len(held), wanted, stream_seed(federation.spec.seed, "pooled-rows", 0))
    return [held[index] for index in drawn]
