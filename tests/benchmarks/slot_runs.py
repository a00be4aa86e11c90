"""Federated searches among the answers of a table: the SDK's methods, clients and mini-batches."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedone_sdk.algorithms import ClassLosses, make_method, stream, stream_seed
from fedone_sdk.algorithms.label_bias import fitted_bias
from fedone_sdk.algorithms.method import Algorithm, Candidates, Holder, PlainAlgorithm
from fedone_sdk.algorithms.method_state import State
from fedone_sdk.algorithms.registry import method_options
from fedone_sdk.algorithms.space import Space
from fedone_sdk.data import draw_minibatch
from fedone_sdk.data.draws import dirichlet, iid
from fedone_sdk.losses import num_groups
from tests.benchmarks.attacks import ATTACKS

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

HALVING = 0.2

TABLES = Path(__file__).parents[2] / "docs" / "benchmarks" / "slot-tables"
"""The tables of the repository: label log-probabilities and labels, no texts of the data."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A prompt on all rows of a table."""

    loss: float
    accuracy: float
    bias: Floats


class Table:
    """A model's answers to every combination of a cell's candidates.

    Args:
        file: The output of `slot_tables.build`.
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
        self.num_groups = num_groups(self.num_labels, private=False)
        self._best = lru_cache(maxsize=None)(self._measured_best)

    def rows_of(self, prompts: Ints) -> Ints:
        """Return the rows of some prompts in the table; candidates beyond a slot wrap around."""
        found: Ints = np.ravel_multi_index(
            tuple((prompts % np.array(self.sizes)).T), self.sizes
        ).astype(np.int64)
        return found

    @cached_property
    def space(self) -> Space:
        """Its slots."""
        blanks = [None if blank < 0 else blank for blank in self.blanks]
        return Space.of([(1, *one) for one in zip(self.sizes, blanks, strict=True)])

    def numbers(self, prompt: int, bias: Floats, rows: list[int]) -> Floats:
        """Return what a client reports of each row: loss, trace and probabilities, (B, 2 + C)."""
        shifted = self.log_probs[prompt, rows] + bias
        odds = np.exp(shifted - shifted.max(axis=1, keepdims=True))
        probabilities = odds / odds.sum(axis=1, keepdims=True)
        losses = self._cross_entropy(self.log_probs[prompt], bias)[rows]
        traces = 1.0 - (probabilities**2).sum(axis=1)
        return np.concatenate([losses[:, None], traces[:, None], probabilities], axis=1)

    @cached_property
    def none(self) -> int:
        """No prompt: each slot blank, or else its first candidate."""
        reference = np.array([[max(blank, 0) for blank in self.blanks]])
        return int(self.rows_of(reference)[0])

    @cached_property
    def oracle(self) -> int:
        """The prompt with the least loss, each at its best bias."""
        return int(np.argmin([self.best(one).loss for one in range(len(self.prompts))]))

    @cached_property
    def instruction(self) -> int:
        """The best of the prompts that consist of an instruction only."""
        plain = self.prompts[self.none]
        alone = np.flatnonzero((self.prompts[:, 1:] == plain[1:]).all(axis=1))
        return int(min(alone, key=lambda one: self.best(int(one)).loss))

    def measured(self, prompt: int, bias: Floats) -> Measured:
        """Evaluate a prompt with a bias on all rows."""
        values = self.log_probs[prompt]
        right = (values + bias).argmax(axis=1) == self.targets
        loss = self._cross_entropy(values, bias).mean()
        return Measured(loss=float(loss), accuracy=float(right.mean()), bias=bias)

    def best(self, prompt: int) -> Measured:
        """Evaluate a prompt with its best bias on all rows."""
        return self._best(prompt)

    def _measured_best(self, prompt: int) -> Measured:
        return self.measured(prompt, fitted_bias(self.log_probs[prompt], self.targets))

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
    """The rows of each client and the client of each round: equal for all methods with one seed.

    Attributes:
        table: The answers.
        clients: K.
        batch_size: B.
        alpha: Of the Dirichlet partition; None is IID.
        liars: Number of clients that exchange the losses of their best and worst prompts.
        seed: The run's.
    """

    table: Table
    clients: int
    batch_size: int
    alpha: float | None = None
    liars: int = 0
    seed: int

    @cached_property
    def shards(self) -> list[list[int]]:
        """Return the rows of each client."""
        seed = stream_seed(self.seed, "partition", 0)
        if self.alpha is None:
            return iid(len(self.table.targets), self.clients, seed)
        return dirichlet(self.table.targets.tolist(), self.clients, self.alpha, seed)

    def client(self, round_number: int) -> int:
        """Return the client of a round."""
        rng = stream(stream_seed(self.seed, "selection", round_number))
        return int(rng.integers(self.clients))

    def holder(self, client: int) -> Holder:
        """Return what the server knows of a client's rows."""
        return Holder(client, all_rows=len(self.shards[client]) <= self.batch_size)

    def mini_batch(self, round_number: int) -> list[int]:
        """Return the rows of a round."""
        client = self.client(round_number)
        shard = self.shards[client]
        seed = stream_seed(self.seed, "minibatch", round_number, client)
        return [shard[at] for at in draw_minibatch(len(shard), self.batch_size, seed)]

    def by_class(self, candidates: Candidates, round_number: int) -> ClassLosses:
        """Return what the round's client reports of some prompts under calibration."""
        rows, table = self.mini_batch(round_number), self.table
        labels = np.eye(table.num_labels)[table.targets[rows]]
        groups = labels if table.num_groups > 1 else np.ones((len(rows), 1))
        counts = groups.sum(axis=0)
        shares = (groups / np.maximum(counts, 1.0)).T
        biases = np.array(candidates.biases, dtype=np.float64)
        at = zip(table.rows_of(candidates.prompts).tolist(), biases, strict=True)
        means = np.stack([shares @ table.numbers(prompt, bias, rows) for prompt, bias in at])
        return ClassLosses(
            means=self._returned(means, round_number),
            counts=counts.astype(np.int64),
            targets=np.eye(table.num_labels) if table.num_groups > 1 else shares @ labels,
            biases=biases,
        )

    def plain(self, prompts: Ints, round_number: int, *, own_bias: bool) -> Floats:
        """Return mean losses, as the round's client does without calibration.

        Args:
            prompts: The prompts.
            round_number: The round.
            own_bias: Whether each prompt has its own best bias, which a real run cannot know;
                otherwise all have the bias of no prompt.
        """
        found, rows = [], self.mini_batch(round_number)
        for one in self.table.rows_of(prompts):
            bias = self.table.best(int(one) if own_bias else self.table.none).bias
            losses = self.table._cross_entropy(self.table.log_probs[one], bias)
            found.append(losses[rows].mean())
        return self._returned(np.array(found), round_number)

    def _returned(self, losses: Floats, round_number: int) -> Floats:
        """Return losses as reported by the round's client; clients are already shuffled."""
        if self.client(round_number) >= self.liars:
            return losses
        return ATTACKS["reversed"](losses, np.random.default_rng(0))


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """A method with its settings.

    Attributes:
        label: Display name.
        name: The method's; ``once`` is `Once`.
        num_samples: I, prompts per ask.
        options: Its own.
        calibrates: Whether it gets losses by class and bias, and fits its own bias.
        own_bias: Otherwise, whether each prompt's loss is at its own best bias, which a real run
            cannot know, instead of that of no prompt.
        moments: Where an optimiser's moments are kept: per ``client``, or in the ``run``.
        halves: Whether the last fifth of a search is successive halving, the default of runs.
    """

    label: str
    name: str
    num_samples: int = 5
    options: Mapping[str, Any] = field(default_factory=dict)
    calibrates: bool = True
    own_bias: bool = False
    moments: str = "client"
    halves: bool = True

    def method(self, table: Table, asks: int, seed: int) -> Algorithm | Once:
        """Return the method for one run."""
        if self.name == "once":
            return Once(table, self.num_samples)
        allowed = method_options(self.name)
        options = dict(self.options)
        halving = math.floor(HALVING * asks) if self.halves else 0
        options |= {"halving": halving, "search": asks - halving if halving else None}
        if self.calibrates:
            options |= {"num_labels": table.num_labels, "num_groups": table.num_groups}
        return make_method(
            self.name,
            space=table.space,
            num_samples=self.num_samples,
            seed=seed,
            **{key: value for key, value in options.items() if key in allowed},
        )


class Once(PlainAlgorithm):
    """Random prompts, each evaluated once; the one with the least loss is deployed."""

    shares_memory = True

    def __init__(self, table: Table, num_samples: int) -> None:
        self._table, self.num_samples = table, num_samples

    def init(self) -> State:
        """Return the empty state."""
        return State(alpha=np.ones((1, 1), dtype=np.float32))

    def ask(self, state: State, rng: np.random.Generator, count: int, holder: Holder) -> Candidates:
        """Random prompts."""
        space = self._table.space
        return Candidates(prompts=space.random(count, rng), probabilities=space.uniform)

    def tell(self, state: State, candidates: Candidates, losses: Floats) -> State:
        """Keep the best prompt so far."""
        at = int(losses.argmin())
        if state.memory and float(state.memory["loss"][0]) <= losses[at]:
            return state
        memory = {"loss": losses[at : at + 1], "prompt": candidates.prompts[at]}
        return State(alpha=state.alpha, memory=memory)

    def prompt(self, state: State) -> Ints:
        """Return the best prompt so far."""
        found: Ints = state.memory["prompt"]
        return found


def _policy(name: str, label: str, *, best: bool = False, **settings: Any) -> Contestant:
    count = settings.pop("num_samples", 5 if best else 20)
    moments = "run" if best else "client"
    return Contestant(
        label=label,
        name=name,
        num_samples=count,
        options=settings,
        calibrates=False,
        own_bias=best,
        moments=moments,
    )


CONTESTANTS: dict[str, Contestant] = {
    "once": Contestant(
        label="random, each prompt once", name="once", calibrates=False, own_bias=True
    ),
    "random": Contestant(label="random, halving", name="random"),
    "tpe": Contestant(label="TPE, halving", name="tpe"),
    "tpe-plain": Contestant(label="TPE", name="tpe", halves=False),
    "thompson": Contestant(label="thompson (default)", name="thompson"),
    "thompson-no-halving": Contestant(label="thompson, no halving", name="thompson", halves=False),
    "thompson-told": Contestant(
        label="thompson, updated at best biases", name="thompson", calibrates=False, own_bias=True
    ),
    "gs-bdpl-paper": _policy("gs-bdpl", "GS-BDPL, the paper's settings"),
    "gs-bdpl-best": _policy(
        "gs-bdpl", "GS-BDPL at its best", best=True, tau=0.5, learning_rate=0.03
    ),
    "bdpl-paper": _policy("bdpl", "BDPL, the paper's settings"),
    "bdpl-best": _policy("bdpl", "BDPL at its best", best=True, learning_rate=0.03),
}


def pilots() -> dict[str, Contestant]:
    """Return the settings that GS-BDPL and BDPL are chosen from."""
    found = {}
    for rate in (0.003, 0.01, 0.03, 0.1):
        for count in (5, 20):
            common: dict[str, Any] = {"learning_rate": rate, "num_samples": count, "best": True}
            name = f"bdpl-{count}-{rate:g}"
            found[name] = _policy("bdpl", name, **common)
            for tau in (0.1, 0.5, 1.0):
                name = f"gs-bdpl-{count}-{rate:g}-{tau:g}"
                found[name] = _policy("gs-bdpl", name, tau=tau, **common)
    return found


def trial(contestant: Contestant, federation: Federation, queries: int) -> dict[str, Any]:
    """Run once, and evaluate the deployable prompt after `queries` on all rows.

    ``rows`` counts the pairs of prompt and example in all queries, ``new_rows`` the distinct ones.
    ``plain_loss`` is of no prompt with the bias that the run fitted for it, ``best_loss`` of the
    deployed prompt with the best bias on all rows.
    """
    table, seed = federation.table, federation.seed
    asks = queries // contestant.num_samples
    method = contestant.method(table, asks, seed)
    state, spent = method.init(), 0
    memories: dict[int, Any] = {}
    asked_rows, known_rows = 0, set[tuple[int, int]]()
    for step in range(asks):
        if method.finished(state):
            break
        client = federation.client(step)
        if not method.shares_memory and contestant.moments == "client":
            state = type(state)(alpha=state.alpha, memory=memories.get(client, {}))
        rng = stream(stream_seed(seed, "prompts", step))
        candidates = method.ask(state, rng, method.wanted(state), federation.holder(client))
        prompts = candidates.prompts
        spent += len(prompts)
        pairs = list(
            itertools.product(map(int, table.rows_of(prompts)), federation.mini_batch(step))
        )
        asked_rows, known_rows = asked_rows + len(pairs), known_rows.union(pairs)
        updated: Any = (
            federation.by_class(candidates, step)
            if contestant.calibrates
            else federation.plain(prompts, step, own_bias=contestant.own_bias)
        )
        state = method.tell(state, candidates, updated)
        memories[client] = state.memory
    prompt = int(table.rows_of(np.array(method.prompt(state))[None])[0])
    bias = method.bias(state)
    if bias is None:
        bias = table.best(prompt if contestant.own_bias else table.none).bias
    deployed, best = table.measured(prompt, bias), table.best(prompt)
    plain = method.plain_bias(state)
    if plain is None:
        plain = np.zeros(table.num_labels) if contestant.calibrates else table.best(table.none).bias
    return {
        "prompt": table.prompts[prompt].tolist(),
        "spent": spent,
        "rows": asked_rows,
        "new_rows": len(known_rows),
        "pairs": sorted(known_rows),
        "bias": bias.tolist(),
        "loss": deployed.loss,
        "accuracy": deployed.accuracy,
        "best_loss": best.loss,
        "plain_loss": table.measured(table.none, plain).loss,
    }
