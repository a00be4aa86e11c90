"""Queries to a target for K* clients per round, each with its own learning rate, on a table.

    PYTHONPATH=examples/paper python -m tests.benchmarks.slot_clients --cell smollm2-sst2

The table (`tests.benchmarks.slots`) holds a real model's answers to all prompts, so the expected
loss of a prompt drawn from alpha is exact. The target is a share of the gap between the untrained
alpha's loss and the best prompt's. Pilot seeds choose the learning rates; the repeats use other
seeds.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedone_paper.queries import queries_text
from fedone_paper.statistics import compared, median_interval
from fedone_sdk.algorithms import make_method, stream, stream_seed
from fedone_sdk.algorithms.method import PlainAlgorithm
from fedone_sdk.algorithms.state import State
from tests.benchmarks.slot_runs import TABLES, Table

CLIENTS = 12
SAMPLES = 20
CAP = 6000
PILOTS = range(9001, 9005)
PARTICIPANTS = (1, 3, 10)
RATES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
METHODS: Mapping[str, Mapping[str, float]] = {"gs-bdpl": {"tau": 1.0}, "bdpl": {}}


def main() -> None:
    """Choose rates on the pilots, run the repeats and print Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", type=Path, default=TABLES)
    parser.add_argument("--cell", default="smollm2-sst2")
    parser.add_argument("--seeds", type=int, default=40)
    parser.add_argument("--share", type=float, default=0.5, help="of the gap, the target")
    args = parser.parse_args()
    bench = Bench(Table(args.tables / f"{args.cell}.npz"), args.share)
    for name in METHODS:
        pilots = {
            (count, rate): [bench.queries(name, count, rate, seed) for seed in PILOTS]
            for count, rate in itertools.product(PARTICIPANTS, RATES)
        }
        own = {count: _best(pilots, count) for count in PARTICIPANTS}
        print(*_pilots(name, pilots), sep="\n", flush=True)
        for title, rates in {
            f"the rate of K* = 1, {own[1]:g}, for all": dict.fromkeys(PARTICIPANTS, own[1]),
            "each K* at its own rate": own,
        }.items():
            runs = {
                count: [bench.queries(name, count, rate, seed) for seed in range(args.seeds)]
                for count, rate in rates.items()
            }
            print(*_report(f"{name}, {title}", rates, runs), sep="\n", flush=True)


class Bench:
    """Runs of a policy on a table, with all prompts at their best biases.

    Args:
        table: The answers.
        share: The target, as a share of the gap from the untrained expected loss to the least.
    """

    def __init__(self, table: Table, share: float) -> None:
        self._table, self._share = table, share
        biases = np.array([table.best(one).bias for one in range(len(table.prompts))])
        # Loss of each prompt on each row, nats.
        self._losses: NDArray[np.float64] = np.stack(
            [table._cross_entropy(table.log_probs[one], bias) for one, bias in enumerate(biases)]
        )
        self._means = self._losses.mean(axis=1)
        self._rows = range(len(table.targets))

    def queries(self, name: str, participants: int, rate: float, seed: int) -> float:
        """Return the queries until the expected loss reaches the target; infinite if never."""
        table = self._table
        method = make_method(
            name,
            prompt_len=len(table.sizes),
            vocab_size=max(table.sizes),
            num_samples=SAMPLES,
            seed=seed,
            learning_rate=rate,
            space=table.space,
            **METHODS[name],
        )
        assert isinstance(method, PlainAlgorithm)
        shards = self._shards(seed)
        memories: dict[int, Mapping[str, NDArray[np.float32]]] = {}
        alpha = method.init().alpha
        untrained = self._expected(alpha)
        target = untrained - self._share * (untrained - self._means.min())
        for round_number in range(CAP // (SAMPLES * participants)):
            chosen = stream(stream_seed(seed, "selection", round_number)).permutation(CLIENTS)
            moved = []
            for client in map(int, chosen[:participants]):
                state = State(alpha=alpha, memory=memories.get(client, {}))
                rng = stream(stream_seed(seed, "prompts", round_number, client))
                candidates = method.ask(state, rng, SAMPLES)
                at = table.rows_of(candidates.prompts)
                losses = self._losses[at][:, shards[client]].mean(axis=1)
                state = method.tell(state, candidates, losses)
                memories[client] = state.memory
                moved.append(state.alpha)
            alpha = method.project(np.mean(moved, axis=0))
            if self._expected(alpha) <= target:
                return float((round_number + 1) * SAMPLES * participants)
        return math.inf

    def _shards(self, seed: int) -> list[list[int]]:
        order = stream(stream_seed(seed, "partition", 0)).permutation(list(self._rows))
        return [list(map(int, part)) for part in np.array_split(order, CLIENTS)]

    def _expected(self, alpha: NDArray[np.float32]) -> float:
        """Return the mean loss over prompts drawn from alpha, over all rows."""
        weights = alpha / alpha.sum(axis=1, keepdims=True)
        chances = np.prod(
            [weights[slot][self._table.prompts[:, slot]] for slot in range(len(weights))], axis=0
        )
        return float(chances @ self._means)


def _best(pilots: Mapping[tuple[int, float], Sequence[float]], count: int) -> float:
    """Return the rate with the fewest mean queries over pilots; a run without success is capped."""
    return min(RATES, key=lambda rate: statistics.fmean(_capped(pilots[count, rate])))


def _capped(queries: Iterable[float]) -> Iterator[float]:
    return (min(one, CAP) for one in queries)


def _pilots(name: str, pilots: Mapping[tuple[int, float], Sequence[float]]) -> Iterator[str]:
    yield f"\n**{name}, pilots**: mean queries of {len(PILOTS)} seeds, {CAP:,} where never\n"
    yield "| K\\* | " + " | ".join(f"{rate:g}" for rate in RATES) + " |"
    yield "| --- " * (1 + len(RATES)) + "|"
    for count in PARTICIPANTS:
        cells = (f"{statistics.fmean(_capped(pilots[count, rate])):,.0f}" for rate in RATES)
        yield f"| {count} | " + " | ".join(cells) + " |"


def _report(
    title: str, rates: Mapping[int, float], runs: Mapping[int, Sequence[float]]
) -> Iterator[str]:
    yield f"\n**{title}**\n"
    yield "| K\\* | rate | reached | median queries | 95 % interval | K\\* = 1 needs fewer in |"
    yield "| --- | ---: | ---: | ---: | ---: | --- |"
    for count, queries in runs.items():
        reached = sum(one < math.inf for one in queries)
        middle = median_interval(queries)
        against = ""
        if count != 1:
            pair = compared(runs[1], queries)
            against = (
                f"{pair.fewer} of {pair.fewer + pair.more} that differ, p = {pair.p_value:.2g}"
            )
        yield (
            f"| {count} | {rates[count]:g} | {reached} of {len(queries)} | "
            f"{queries_text(middle.value, CAP)} | {queries_text(middle.low, CAP)} to "
            f"{queries_text(middle.high, CAP)} | {against} |"
        )


if __name__ == "__main__":
    main()
