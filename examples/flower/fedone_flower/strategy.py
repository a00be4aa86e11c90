"""A strategy for Flower. In each round one node gets prompts, and returns their losses."""

from __future__ import annotations

import time
from collections.abc import Iterable
from logging import INFO, WARNING
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedone_sdk.algorithms import Algorithm, Candidates, alpha_sha256, stream, stream_seed
from fedone_sdk.vocabulary import Vocabulary

_LOOK_S = 0.5
"""Interval of polling for nodes, seconds."""


class FedOneStrategy(Strategy):
    """Tunes a prompt by `ask` and `tell`, with one node per round and a cap on queries.

    A round's queries are counted before its message is sent, so that no node can exceed the cap.
    They also count if the node sends no valid reply.

    Args:
        method: The method that chooses prompts.
        vocabulary: The method's candidates.
        max_queries: The cap; one query is one prompt on one mini-batch.
        batch_size: Rows of a mini-batch.
        min_nodes: Number of nodes that the first round waits for.
        seed: Seed of all draws.

    Attributes:
        state: The state of the method.
        spent: Queries that were sent.
    """

    def __init__(
        self,
        method: Algorithm,
        vocabulary: Vocabulary,
        *,
        max_queries: int,
        batch_size: int = 16,
        min_nodes: int = 1,
        seed: int = 0,
    ) -> None:
        self.method, self.state, self.spent = method, method.init(), 0
        self._vocabulary, self._max_queries, self._seed = vocabulary, max_queries, seed
        self._batch_size, self._min_nodes = batch_size, min_nodes
        self._asked: Candidates | None = None

    @property
    def prompt(self) -> str:
        """The prompt to deploy if the run stopped now."""
        return self._vocabulary.text(self.method.prompt(self.state))

    def tune(self, grid: Grid, *, timeout: float = 3600.0) -> Result:
        """Run as many rounds as the cap pays for; see `Strategy.start`.

        Args:
            grid: Flower's connection to the nodes.
            timeout: Longest wait for the reply of a node, seconds.
        """
        return self.start(
            grid=grid,
            initial_arrays=ArrayRecord([self.state.alpha]),
            num_rounds=self._max_queries // self.method.num_samples,
            timeout=timeout,
        )

    def summary(self) -> None:
        """Log the settings."""
        log(INFO, "FedOne: at most %d queries, %d a round", self._max_queries, self._per_round)

    @property
    def _per_round(self) -> int:
        return self.method.num_samples

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Get prompts from the method, and send them to one node."""
        self._asked = None
        if self.spent + self._per_round > self._max_queries:
            return []
        while len(nodes := sorted(grid.get_node_ids())) < self._min_nodes:
            time.sleep(_LOOK_S)
        draws = {
            purpose: stream_seed(self._seed, purpose, server_round)
            for purpose in ("selection", "prompts", "minibatch")
        }
        self._asked = self.method.ask(self.state, stream(draws["prompts"]))
        self.spent += self._per_round
        work = ConfigRecord(
            {
                "prompts": [self._vocabulary.text(prompt) for prompt in self._asked.prompts],
                "batch-size": self._batch_size,
                "seed": draws["minibatch"],
            }
        )
        node = nodes[int(stream(draws["selection"]).integers(len(nodes)))]
        return [Message(RecordDict({"work": work}), dst_node_id=node, message_type="train")]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Pass the losses to the method."""
        for reply in replies:
            losses = _losses_of(reply, self._per_round)
            if losses is None or self._asked is None:
                log(WARNING, "round %d: the node's reply is not used", server_round)
                continue
            self.state = self.method.tell(self.state, self._asked, losses)
            found = {"loss": float(np.mean(losses)), "queries": self.spent}
            return ArrayRecord([self.state.alpha]), MetricRecord(found)
        return None, None

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send nothing: prompts are measured on the server's dev split."""
        return []

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return nothing."""
        return None

    @property
    def alpha_sha256(self) -> str:
        """Digest of the method's state; equal if the model's answers are equal."""
        return alpha_sha256(self.state.alpha)


def _losses_of(reply: Message, count: int) -> np.ndarray[Any, np.dtype[np.float64]] | None:
    """Return the losses of an untrusted reply; None if the reply is not valid."""
    if reply.has_error():
        return None
    values = reply.content.metric_records.get("losses", {}).get("losses", ())
    losses = np.asarray(values, dtype=np.float64)
    return losses if losses.shape == (count,) and np.isfinite(losses).all() else None
