"""The toy federation: clients train a small network on digits, and the server averages."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedone_paper.digits import Digits, load_digits
from fedone_paper.mlp import Mlp
from fedone_sdk.algorithms import aggregate, select, stream, stream_seed
from fedone_sdk.data import dirichlet, iid
from fedone_sdk.errors import ArgumentError
from fedone_sdk.evaluation.engine import Result, Workspace


@dataclass(frozen=True, slots=True, kw_only=True)
class Toy:
    """One toy federation; the defaults are the paper's.

    Attributes:
        clients_per_round: K*.
        dirichlet_alpha: Concentration of the clients' class shares; None is IID.
        num_clients: K.
        num_hidden: Width of the hidden layer.
        local_epochs: Passes over a client's rows in one visit; its last mini-batch may be smaller.
        max_queries: No round starts that would pass this.
        measure_every: Queries between two measurements of the test accuracy.
    """

    clients_per_round: int
    seed: int
    dirichlet_alpha: float | None = None
    num_clients: int = 100
    num_hidden: int = 512
    learning_rate: float = 0.01
    batch_size: int = 32
    local_epochs: int = 2
    max_queries: int = 24_000
    measure_every: int = 20


def run_toy(options: dict[str, Any], workspace: Workspace) -> Result:
    """Run a toy federation to the end of its queries.

    A query is what a call of the language model is to the paper's methods: the forward pass of one
    mini-batch. A client's visit makes ``local_epochs * ceil(rows / batch_size)`` of them.

    Args:
        options: The fields of `Toy`.
        workspace: Has the input ``data`` where the digits are not the bundled ones.

    Returns:
        ``queries`` and ``accuracy`` (the curve, test split), ``rounds``, ``visits``, ``data``,
        ``pixels``, and the ``rows`` of the smallest, middle and largest client.

    Raises:
        SpecError: The queries last for no measurement beyond the first.
    """
    toy, digits = Toy(**options), load_digits(workspace.inputs.get("data"))
    clients = ToyClients(toy, digits)
    parameters = clients.network.init(_stream(toy, "toy-init"))
    queries, due, visits = 0, toy.measure_every, 0
    curve = [(0, clients.accuracy(parameters))]
    for round_number, chosen in enumerate(clients.rounds()):
        parameters = clients.round(parameters, chosen, round_number)
        visits += len(chosen)
        queries += clients.cost(chosen)
        if queries >= due:
            curve.append((queries, clients.accuracy(parameters)))
            due = queries - queries % toy.measure_every + toy.measure_every
    if len(curve) == 1:
        raise ArgumentError(
            f"max_queries: {toy.max_queries} do not pay for a measurement of K*="
            f"{toy.clients_per_round}"
        )
    sizes = sorted(map(len, clients.shards))
    return {
        "queries": [point[0] for point in curve],
        "accuracy": [point[1] for point in curve],
        "rounds": round_number + 1,
        "visits": visits,
        "data": digits.name,
        "pixels": digits.num_pixels,
        "rows": [sizes[0], sizes[len(sizes) // 2], sizes[-1]],
    }


class ToyClients:
    """The clients of a toy federation, and the server's averaging.

    Attributes:
        network: What they train.
        shards: Each client's rows of the training split.
    """

    def __init__(self, toy: Toy, digits: Digits) -> None:
        self._toy, self._digits = toy, digits
        self.network = Mlp(num_inputs=digits.num_pixels, num_hidden=toy.num_hidden)
        labels, seed = digits.train_labels.tolist(), stream_seed(toy.seed, "toy-partition", 0)
        if toy.dirichlet_alpha is None:
            self.shards = iid(len(labels), toy.num_clients, seed)
        else:
            self.shards = dirichlet(labels, toy.num_clients, toy.dirichlet_alpha, seed)

    def cost(self, chosen: Sequence[int]) -> int:
        """Query of a round."""
        toy = self._toy
        batches = (math.ceil(len(self.shards[client]) / toy.batch_size) for client in chosen)
        return toy.local_epochs * sum(batches)

    def rounds(self) -> Iterator[list[int]]:
        """Yield the clients of each round, by index, up to the cap on queries."""
        held = {client: len(shard) for client, shard in enumerate(self.shards)}
        round_number, spent = 0, 0
        while True:
            rng = _stream(self._toy, "selection", round_number)
            chosen = sorted(select(held, self._toy.clients_per_round, rng=rng))
            spent += self.cost(chosen)
            if spent > self._toy.max_queries:
                return
            yield chosen
            round_number += 1

    def round(
        self, parameters: NDArray[np.float32], chosen: Sequence[int], round_number: int
    ) -> NDArray[np.float32]:
        """One round of FedAvg (McMahan et al. 2017): clients train from the same parameters.

        The mean is weighted by the rows that the clients hold.
        """
        trained = [self._train(parameters, client, round_number) for client in chosen]
        return aggregate(trained, [len(self.shards[client]) for client in chosen])

    def accuracy(self, parameters: NDArray[np.float32]) -> float:
        """Return the share of the test split that is classified correctly."""
        found = self.network.predict(parameters, self._digits.test_images)
        return float(np.mean(found == self._digits.test_labels))

    def _train(
        self, parameters: NDArray[np.float32], client: int, round_number: int
    ) -> NDArray[np.float32]:
        toy, network, shard = self._toy, self.network, np.array(self.shards[client])
        rng = _stream(toy, "toy-training", round_number, client)
        trained = parameters.copy()
        for _ in range(toy.local_epochs):
            order = np.argsort(rng.random(len(shard)), kind="stable")
            for start in range(0, len(shard), toy.batch_size):
                rows = shard[order[start : start + toy.batch_size]]
                _, gradient = network.loss_and_gradient(
                    trained,
                    self._digits.train_images[rows],
                    self._digits.train_labels[rows],
                    network.draw_mask(len(rows), rng),
                )
                trained -= np.float32(toy.learning_rate) * gradient
        return trained


def _stream(toy: Toy, purpose: str, round_number: int = 0, client: int = 0) -> np.random.Generator:
    return stream(stream_seed(toy.seed, purpose, round_number, client))
