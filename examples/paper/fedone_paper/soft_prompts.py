"""Federated tuning of soft prompts in one process: BBT, prompt tuning and P-tuning v2.

Clients, mini-batches and prompts are drawn with the random streams of a served run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedone_paper.bbt import CmaEs, projected, reach
from fedone_paper.soft_model import Kind, Soft, SoftModel
from fedone_sdk.algorithms import aggregate, select, stream, stream_seed
from fedone_sdk.data import draw_minibatch
from fedone_sdk.task import Example, TaskSpec

Alpha = NDArray[np.float32]


class Step(NamedTuple):
    """A local step: its mini-batch, and the seed of its prompts."""

    batch: Sequence[Example]
    prompt_seed: int


class Visit(NamedTuple):
    """What a client returns: its alpha, its mean loss (nats) and its queries."""

    alpha: Alpha
    loss: float
    queries: int


@dataclass(frozen=True, kw_only=True)
class BBT:
    """Black-box tuning of a soft prompt by CMA-ES (Sun et al., ICML 2022).

    Alpha is the mean of CMA-ES, one row of d numbers, which the server averages. Each client keeps
    the rest of its CMA-ES state. The model scores the projections of bounded numbers.

    Attributes:
        prompt_len: n, the number of positions.
        num_samples: I, the population.
        intrinsic_dim: d.
        sigma: The first step size.
        bound: Scored numbers lie in [-bound, bound].
    """

    model: SoftModel
    task: TaskSpec
    prompt_len: int
    num_samples: int = 20
    batch_size: int = 32
    local_steps: int = 1
    intrinsic_dim: int = 500
    sigma: float = 1.0
    bound: float = 5.0
    searches: dict[int, CmaEs] = field(default_factory=dict)

    def init(self) -> Alpha:
        """Return the zero vector."""
        return np.zeros((1, self.intrinsic_dim), dtype=np.float32)

    def soft(self, alpha: Alpha) -> Soft:
        """Return the projection of a vector."""
        vectors = projected(
            alpha.ravel(),
            prompt_len=self.prompt_len,
            size=self.model.width,
            scale=self.model.embedding_std / self.sigma,
            bound=self.bound,
            seed=0,
        )
        return Soft("embeddings", import_module("torch").from_numpy(vectors))

    def visit(self, alpha: Alpha, client: int, steps: Sequence[Step]) -> Visit:
        """Do one generation of CMA-ES per step."""
        initial = CmaEs.initial(self.intrinsic_dim, self.sigma)
        search, limit = self.searches.get(client, initial), reach(self.bound)
        torch = import_module("torch")
        found: list[float] = []
        for step in steps:
            mean = alpha[0].astype(np.float64)
            points = search.sample(mean, self.num_samples, stream(step.prompt_seed))
            points = points.astype(np.float32)
            soft = Soft("embeddings", torch.stack([self.soft(point).values for point in points]))
            with torch.inference_mode():
                losses = self.model.losses(self.task, step.batch, soft).tolist()
            mean, search = search.after(
                mean, points.astype(np.float64), np.array(losses), reach=limit
            )
            alpha = np.clip(mean[None, :], -limit, limit).astype(np.float32)
            found += losses
        self.searches[client] = search
        return Visit(alpha, sum(found) / len(found), len(found))


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A soft prompt for a frozen model. Clients train it with AdamW; the server averages.

    AdamW's state is reset at each visit. Training has no dropout.

    Attributes:
        kind: ``embeddings`` for prompt tuning (Lester et al. 2021), ``key_values`` for P-tuning v2
            (Liu et al. 2022), without reparameterisation.
        seed: Seed of the initial values.
        init_std: Standard deviation of the initial values.
    """

    model: SoftModel
    task: TaskSpec
    prompt_len: int
    kind: Kind
    seed: int
    batch_size: int = 32
    local_steps: int = 1
    learning_rate: float = 1e-2
    init_std: float = 0.02

    def init(self) -> Alpha:
        """Return normal random values."""
        layers = 2 * self.model.num_layers if self.kind == "key_values" else 1
        shape = layers * self.prompt_len, self.model.width
        rng = stream(stream_seed(self.seed, "parameters", 0))
        return rng.normal(scale=self.init_std, size=shape).astype(np.float32)

    def soft(self, alpha: Alpha) -> Soft:
        """Return the parameters as vectors."""
        return Soft(self.kind, import_module("torch").from_numpy(alpha))

    def visit(self, alpha: Alpha, client: int, steps: Sequence[Step]) -> Visit:
        """Take one step of AdamW per mini-batch."""
        torch = import_module("torch")
        weights = torch.tensor(alpha, requires_grad=True)
        optimizer = torch.optim.AdamW([weights], lr=self.learning_rate, weight_decay=0.0)
        losses = []
        for step in steps:
            optimizer.zero_grad()
            (loss,) = self.model.losses(self.task, step.batch, Soft(self.kind, weights))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return Visit(weights.detach().numpy(), sum(losses) / len(losses), 0)


Method = BBT | Trained
"""A method whose clients tune a soft prompt."""


class Round(NamedTuple):
    """A finished round: its alpha, its mean loss (nats), its training queries and its visits."""

    alpha: Alpha
    loss: float
    queries: int
    visits: int


def rounds(
    method: Method, shards: Sequence[Sequence[Example]], clients_per_round: int, seed: int
) -> Iterator[Round]:
    """Yield rounds of FedOne (K* = 1) or FedAvg, endlessly."""
    alpha, held = method.init(), {client: len(rows) for client, rows in enumerate(shards)}
    number = 0
    while True:
        rng = stream(stream_seed(seed, "selection", number))
        chosen = select(held, min(clients_per_round, len(held)), rng=rng)
        visits = {}
        for slot, client in enumerate(chosen):
            steps = []
            for step in range(method.local_steps):
                place = number, client, slot * method.local_steps + step
                rows = shards[client]
                drawn = draw_minibatch(
                    len(rows), method.batch_size, stream_seed(seed, "minibatch", *place)
                )
                prompt_seed = stream_seed(seed, "prompts", *place)
                steps.append(Step([rows[index] for index in drawn], prompt_seed))
            visits[client] = method.visit(alpha, client, steps)
        found = [visits[client] for client in sorted(visits)]
        alpha = aggregate([visit.alpha for visit in found])
        yield Round(
            alpha,
            float(np.average([visit.loss for visit in found])),
            sum(visit.queries for visit in found),
            len(found),
        )
        number += 1
