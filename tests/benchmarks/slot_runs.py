"""Federated searches among the answers of a table: the SDK's methods, clients and mini-batches."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from fedone_sdk.algorithms import ClassLosses, stream, stream_seed
from fedone_sdk.algorithms.method import Algorithm
from fedone_sdk.algorithms.registry import method_from_spec
from fedone_sdk.calibration import bias_grid
from fedone_sdk.data import draw_minibatch
from fedone_sdk.data.partition import dirichlet, iid
from fedone_sdk.spec.methods import MethodSpec

__all__ = ["CONTESTANTS", "Contestant", "Federation", "Table", "trial"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_SPEC: TypeAdapter[Any] = TypeAdapter(MethodSpec)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A prompt on all rows of a table."""

    loss: float
    accuracy: float
    bias: Floats


class Table:
    """A model's answers to every combination of a cell's candidates.

    Args:
        file: What `slot_tables.build` has written.
    """

    def __init__(self, file: Path) -> None:
        with np.load(file, allow_pickle=False) as found:
            self.sizes: tuple[int, ...] = tuple(map(int, found["sizes"]))
            self.blanks: tuple[int, ...] = tuple(map(int, found["blanks"]))
            self.prompts: Ints = found["prompts"].astype(np.int64)
            self.log_probs: Floats = found["log_probs"].astype(np.float64)
            self.targets: Ints = found["targets"].astype(np.int64)
            self.meta: Mapping[str, Any] = json.loads(str(found["meta"]))
        self.name = file.stem
        order = self.rows_of(self.prompts)
        if not np.array_equal(order, np.arange(len(self.prompts))):
            raise ValueError(f"{file}: not all combinations, in order")
        self.num_labels = self.log_probs.shape[2]
        self.grid: Floats = np.array(bias_grid(self.num_labels))
        self._best = lru_cache(maxsize=None)(self._measured_best)

    def rows_of(self, prompts: Ints) -> Ints:
        """The numbers of some prompts in the table; a candidate that is too high wraps around."""
        found: Ints = np.ravel_multi_index(
            tuple((prompts % np.array(self.sizes)).T), self.sizes
        ).astype(np.int64)
        return found

    @cached_property
    def losses(self) -> Floats:
        """Cross-entropy over the labels, by prompt, row and bias of the grid, nats."""
        return np.stack([self._cross_entropy(self.log_probs, bias) for bias in self.grid], axis=-1)

    @cached_property
    def none(self) -> int:
        """No prompt: blank wherever that is a candidate, else the first one."""
        reference = np.array([[max(blank, 0) for blank in self.blanks]])
        return int(self.rows_of(reference)[0])

    @cached_property
    def oracle(self) -> int:
        """The prompt with the least loss, each at its best bias."""
        return int(np.argmin([self.best(one).loss for one in range(len(self.prompts))]))

    @cached_property
    def instruction(self) -> int:
        """The best of the prompts that are an instruction and nothing else."""
        plain = self.prompts[self.none]
        alone = np.flatnonzero((self.prompts[:, 1:] == plain[1:]).all(axis=1))
        return int(min(alone, key=lambda one: self.best(int(one)).loss))

    def measured(self, prompt: int, bias: Floats) -> Measured:
        """A prompt with a bias on all rows."""
        values = self.log_probs[prompt]
        right = (values + bias).argmax(axis=1) == self.targets
        loss = self._cross_entropy(values, bias).mean()
        return Measured(loss=float(loss), accuracy=float(right.mean()), bias=bias)

    def best(self, prompt: int) -> Measured:
        """A prompt with the bias that is best on all rows."""
        return self._best(prompt)

    def _measured_best(self, prompt: int) -> Measured:
        """By Newton's method: the loss is convex in the bias."""
        values, labels = self.log_probs[prompt], self.num_labels
        wanted = np.bincount(self.targets, minlength=labels) / len(self.targets)
        bias = np.zeros(labels)
        loss = self._cross_entropy(values, bias).mean()
        for _ in range(100):
            shifted = values + bias
            p = np.exp(shifted - shifted.max(axis=1, keepdims=True))
            p /= p.sum(axis=1, keepdims=True)
            slope = (p.mean(axis=0) - wanted)[1:]
            bend = (np.diag(p.mean(axis=0)) - p.T @ p / len(p))[1:, 1:]
            step = np.linalg.solve(bend + 1e-9 * np.eye(labels - 1), slope)
            scale = 1.0
            while scale > 1e-6:
                tried = bias - scale * np.pad(step, (1, 0))
                found = self._cross_entropy(values, tried).mean()
                if found < loss:
                    break
                scale /= 2.0
            else:
                break
            done = loss - found < 1e-10
            bias, loss = tried, found
            if done:
                break
        return self.measured(prompt, bias)

    def _cross_entropy(self, values: Floats, bias: Floats) -> Floats:
        shifted = values + bias
        highest = shifted.max(axis=-1, keepdims=True)
        total = np.log(np.exp(shifted - highest).sum(axis=-1)) + highest[..., 0]
        true = np.take_along_axis(
            shifted, np.broadcast_to(self.targets[:, None], (*shifted.shape[:-1], 1)), axis=-1
        )
        found: Floats = total - true[..., 0]
        return found


@dataclass(frozen=True, kw_only=True)
class Federation:
    """Who holds the rows, and who is asked when: the same for all methods with one seed.

    Attributes:
        table: The answers.
        clients: K.
        batch_size: B.
        alpha: Of the Dirichlet partition; None is IID.
        seed: The run's.
    """

    table: Table
    clients: int
    batch_size: int
    alpha: float | None
    seed: int

    @cached_property
    def shards(self) -> list[list[int]]:
        """The rows of each client."""
        seed = stream_seed(self.seed, "partition", 0)
        if self.alpha is None:
            return iid(len(self.table.targets), self.clients, seed)
        return dirichlet(self.table.targets.tolist(), self.clients, self.alpha, seed)

    def client(self, round_number: int) -> int:
        """Whose turn it is."""
        rng = stream(stream_seed(self.seed, "selection", round_number))
        return int(rng.integers(self.clients))

    def mini_batch(self, round_number: int) -> list[int]:
        """The rows that are asked about in a round."""
        client = self.client(round_number)
        shard = self.shards[client]
        seed = stream_seed(self.seed, "minibatch", round_number, client)
        return [shard[at] for at in draw_minibatch(len(shard), self.batch_size, seed)]

    def by_class(self, prompts: Ints, rows: list[int]) -> ClassLosses:
        """What a client that calibrates says of prompts."""
        found = self.table.losses[self.table.rows_of(prompts)][:, rows]
        targets = self.table.targets[rows]
        counts = np.bincount(targets, minlength=self.table.num_labels)
        means = np.zeros((len(prompts), self.table.num_labels, len(self.table.grid)))
        for label in np.flatnonzero(counts):
            means[:, label] = found[:, targets == label].mean(axis=1)
        return ClassLosses(means=means, counts=counts)

    def plain(self, prompts: Ints, rows: list[int], *, own_bias: bool) -> Floats:
        """What a client that does not calibrate says of prompts.

        Args:
            prompts: The prompts.
            rows: Of the mini-batch.
            own_bias: Whether each prompt has its own best bias, as nobody could know it; else all
                have that of no prompt.
        """
        found = []
        for one in self.table.rows_of(prompts):
            bias = self.table.best(int(one) if own_bias else self.table.none).bias
            losses = self.table._cross_entropy(self.table.log_probs[one], bias)
            found.append(losses[rows].mean())
        return np.array(found)


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """A method with its settings.

    Attributes:
        label: For people.
        spec: As in a run.
        calibrates: Whether it is told losses by class and bias, and finds a bias of its own.
        own_bias: Where it does not: whether each prompt is told and deployed at its own best bias.
        moments: Whose an optimiser's moments are: each ``client``'s, or the ``run``'s.
        make: In the place of the spec's method.
    """

    label: str
    spec: Mapping[str, Any] = field(default_factory=dict)
    calibrates: bool = True
    own_bias: bool = False
    moments: str = "client"
    make: Callable[[Table, int, int], Algorithm] | None = None

    def method(self, table: Table, asks: int, seed: int) -> Algorithm:
        """The method for one run."""
        if self.make is not None:
            return self.make(table, asks, seed)
        found = method_from_spec(
            _SPEC.validate_python(dict(self.spec)),
            prompt_len=len(table.sizes),
            vocab_size=max(table.sizes),
            blank=None,
            seed=seed,
            biases=bias_grid(table.num_labels) if self.calibrates else None,
            asks=asks,
        )
        return found  # type: ignore[return-value]


def _policy(name: str, label: str, **settings: Any) -> Contestant:
    own = settings.pop("own_bias", False)
    moments = settings.pop("moments", "client")
    spec = {"name": name, "num_samples": 20, **settings}
    return Contestant(label=label, spec=spec, calibrates=False, own_bias=own, moments=moments)


_BEST = {"num_samples": 5, "own_bias": True, "moments": "run"}

CONTESTANTS: dict[str, Contestant] = {
    "random": Contestant(
        label="random, leaders looked at again", spec={"name": "random", "num_samples": 5}
    ),
    "thompson": Contestant(label="thompson (default)", spec={"name": "thompson", "num_samples": 5}),
    "gs-bdpl-paper": _policy("gs-bdpl", "GS-BDPL, the paper's settings"),
    "gs-bdpl-best": _policy("gs-bdpl", "GS-BDPL at its best", tau=0.5, learning_rate=0.03, **_BEST),
    "bdpl-paper": _policy("bdpl", "BDPL, the paper's settings"),
    "bdpl-best": _policy("bdpl", "BDPL at its best", learning_rate=0.03, **_BEST),
}


def pilots() -> dict[str, Contestant]:
    """The settings that GS-BDPL and BDPL are chosen from."""
    found = {}
    for rate in (0.003, 0.01, 0.03, 0.1):
        for count in (5, 20):
            common = {**_BEST, "learning_rate": rate, "num_samples": count}
            name = f"bdpl-{count}-{rate:g}"
            found[name] = _policy("bdpl", name, **common)
            for tau in (0.1, 0.5, 1.0):
                name = f"gs-bdpl-{count}-{rate:g}-{tau:g}"
                found[name] = _policy("gs-bdpl", name, tau=tau, **common)
    return found


def trial(contestant: Contestant, federation: Federation, queries: int) -> dict[str, Any]:
    """One run: what it would deploy after `queries`, measured on all rows."""
    table, seed = federation.table, federation.seed
    asks = queries // int(contestant.spec.get("num_samples", 5))
    method = contestant.method(table, asks, seed)
    state, spent = method.init(), 0
    memories: dict[int, Any] = {}
    for step in range(asks):
        if method.finished(state):
            break
        client, rows = federation.client(step), federation.mini_batch(step)
        if not method.shares_memory and contestant.moments == "client":
            state = type(state)(alpha=state.alpha, memory=memories.get(client, {}))
        rng = stream(stream_seed(seed, "prompts", step))
        candidates = method.ask(state, rng, method.wanted(state))
        prompts = candidates.prompts
        spent += len(prompts)
        told = (
            federation.by_class(prompts, rows)
            if contestant.calibrates
            else federation.plain(prompts, rows, own_bias=contestant.own_bias)
        )
        state = method.tell(state, candidates, told)
        memories[client] = state.memory
    prompt = int(table.rows_of(np.array(method.prompt(state))[None])[0])
    bias = method.bias(state)
    if bias is None:
        bias = table.best(prompt if contestant.own_bias else table.none).bias
    deployed, best = table.measured(prompt, bias), table.best(prompt)
    return {
        "prompt": table.prompts[prompt].tolist(),
        "spent": spent,
        "loss": deployed.loss,
        "accuracy": deployed.accuracy,
        "best_loss": best.loss,
    }
