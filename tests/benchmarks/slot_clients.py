"""Queries to a target for K* clients per round, each with its own learning rate, on a table.

    PYTHONPATH=examples/paper python -m tests.benchmarks.slot_clients --optimizer sgd

The table (`tests.benchmarks.slots`) holds a real model's answers to all prompts, so the expected
loss of a prompt drawn from alpha is exact. The targets are shares of the gap between the untrained
alpha's loss and the best prompt's. Pilot seeds choose the learning rates; the repeats use other
seeds. All queries are written to a JSON file, and ``--only-report`` prints the tables of one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedone_paper.queries import interval_text, queries_text
from fedone_paper.statistics import compared, median_interval
from fedone_sdk.algorithms import make_method, stream, stream_seed
from fedone_sdk.algorithms.method import PlainAlgorithm
from fedone_sdk.algorithms.method_state import State
from tests.benchmarks.slot_runs import TABLES, Table

CLIENTS = 12
SAMPLES = 20
CAP = 6000
PILOTS = range(9001, 9009)
PARTICIPANTS = (1, 2, 3, 5, 10)
SHARES = (0.5, 0.8)
RATES: Mapping[str, Sequence[float]] = {
    "adamw": (0.01, 0.03, 0.1, 0.3, 1.0, 3.0),
    "sgd": (0.03, 0.1, 0.3, 1.0, 3.0, 10.0),
}
METHODS: Mapping[str, Mapping[str, float]] = {"gs-bdpl": {"tau": 1.0}, "bdpl": {}}

Queries = Mapping[str, Sequence[float | None]]
"""By the share of the gap: the queries of each seed, None where the target was not reached."""


def main() -> None:
    """Choose rates on the pilots, run the repeats, write the queries and print Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tables", type=Path, default=TABLES)
    parser.add_argument("--cell", default="smollm2-sst2")
    parser.add_argument("--optimizer", choices=RATES, default="adamw")
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--only-report", action="store_true")
    args = parser.parse_args()
    file = args.out / f"{args.cell}-{args.optimizer}.json"
    if not args.only_report:
        bench = Bench(Table(args.tables / f"{args.cell}.npz"), args.optimizer)
        file.write_text(json.dumps({name: bench.study(name, args.seeds) for name in METHODS}))
    for name, found in json.loads(file.read_text()).items():
        for share in map(str, SHARES):
            print(*report(f"{name}, {args.optimizer}, {share} of the gap", found, share), sep="\n")


class Bench:
    """Runs of a policy on a table, with all prompts at their best biases.

    Args:
        table: The answers.
        optimizer: Of the clients' steps.
    """

    def __init__(self, table: Table, optimizer: str) -> None:
        self._table, self._optimizer = table, optimizer
        biases = np.array([table.best(one).bias for one in range(len(table.prompts))])
        # Loss of each prompt on each row, nats.
        self._losses: NDArray[np.float64] = np.stack(
            [table._cross_entropy(table.log_probs[one], bias) for one, bias in enumerate(biases)]
        )
        self._means = self._losses.mean(axis=1)
        self._rows = range(len(table.targets))

    def study(self, name: str, num_seeds: int) -> dict[str, dict[str, dict[str, Queries]]]:
        """Return the queries of pilots by K* and rate, and of repeats by K* and target."""

        def runs(count: int, rate: float, seeds: Iterable[int]) -> Queries:
            found = [self.queries(name, count, rate, seed) for seed in seeds]
            return {
                str(share): [None if math.isinf(one) else one for one in values]
                for share, values in zip(SHARES, zip(*found, strict=True), strict=True)
            }

        pilots = {
            str(count): {str(rate): runs(count, rate, PILOTS) for rate in RATES[self._optimizer]}
            for count in PARTICIPANTS
        }
        repeats: dict[str, dict[str, Queries]] = {}
        for count, share in itertools.product(map(str, PARTICIPANTS), map(str, SHARES)):
            held = repeats.setdefault(count, {})
            rate = best_rate(pilots[count], share)
            if rate not in held:
                held[rate] = runs(int(count), float(rate), range(num_seeds))
        return {"pilots": pilots, "repeats": repeats}

    def queries(self, name: str, participants: int, rate: float, seed: int) -> list[float]:
        """Return the queries until the expected loss reaches each target; infinite if never."""
        table = self._table
        method = make_method(
            name,
            num_samples=SAMPLES,
            seed=seed,
            learning_rate=rate,
            optimizer=self._optimizer,
            space=table.space,
            **METHODS[name],
        )
        assert isinstance(method, PlainAlgorithm)
        shards = self._shards(seed)
        memories: dict[int, Mapping[str, NDArray[np.float32]]] = {}
        alpha = method.init().alpha
        untrained = self._expected(alpha)
        targets = [untrained - share * (untrained - self._means.min()) for share in SHARES]
        found = [math.inf] * len(targets)
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
            expected = self._expected(alpha)
            for place, target in enumerate(targets):
                if expected <= target:
                    found[place] = min(
                        found[place], float((round_number + 1) * SAMPLES * participants)
                    )
            if found[-1] < math.inf:
                break
        return found

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


def best_rate(pilots: Mapping[str, Queries], share: str) -> str:
    """Return the rate with the fewest mean queries over pilots; a run without success is capped."""
    return min(pilots, key=lambda rate: _mean(pilots[rate][share]))


def _mean(queries: Sequence[float | None]) -> float:
    return statistics.fmean(CAP if one is None else one for one in queries)


def report(
    title: str, found: Mapping[str, Mapping[str, Mapping[str, Queries]]], share: str
) -> Iterator[str]:
    """Yield the lines of a table: each K* at its own rate, compared with K* = 1."""
    yield f"\n**{title}**\n"
    yield r"| learning rate | K\* | reached | median | 95 % interval | mean | fewer at K\* = 1 in |"
    yield "|---:|---:|---:|---:|---|---:|---|"
    first: list[float] = []
    for count, pilots in found["pilots"].items():
        rate = best_rate(pilots, share)
        values = found["repeats"][count][rate][share]
        queries = [math.inf if one is None else one for one in values]
        reached = sum(one < math.inf for one in queries)
        first = first or queries
        pair = compared(first, queries)
        against = f"{pair.fewer} of {pair.fewer + pair.more}, p = {pair.p_value:.1g}"
        least = "> " * (reached < len(queries))
        yield (
            f"| {float(rate):g} | {count} | {reached} of {len(queries)} | "
            f"{queries_text(median_interval(queries).value, CAP)} | "
            f"{interval_text(median_interval(queries), CAP)} | {least}{_mean(values):,.0f} | "
            f"{'' if count == '1' else against} |"
        )


if __name__ == "__main__":
    main()
