"""How searches over slots do where a model's answers to all combinations are known.

A table holds what a model says of every row under every combination of candidates. Runs look their
losses up: mini-batches of a few rows, several prompts on each. What a run would hand out is judged
on all rows, each prompt at its best label bias. Its score is the part of the gap between no prompt
and the best prompt that it closes.

    python tests/benchmarks/slot_searches.py --table FILE [--batch 8] [--seeds 20] [--methods ...]

A table is an .npz with `sizes` (n,), `prompts` (P, n) of all combinations, `log_probs` (P, R, C) in
nats, `targets` (R,), and `blanks` (n,), -1 for none. `--synthetic SEED` makes one up.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedone_sdk.algorithms import Algorithm, ClassLosses, make_method, method_options, stream
from fedone_sdk.algorithms.space import Space
from fedone_sdk.calibration import bias_grid
from fedone_sdk.experiments.lies import LIES

MARKS = (50, 100, 200, 300)
RACE = 0.2
LIARS = 0.2

Numbers = NDArray[np.float64]
Prompts = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Table:
    """A model's answers.

    Attributes:
        sizes: Candidates of each slot, shape (n,).
        blanks: The blank candidate of each slot, -1 for none, shape (n,).
        log_probs: Of the labels, shape (P, R, C), combinations in C order.
        targets: Labels of the rows, shape (R,).
    """

    sizes: tuple[int, ...]
    blanks: tuple[int, ...]
    log_probs: Numbers
    targets: Prompts

    @classmethod
    def load(cls, file: Path) -> Table:
        """Read a table."""
        with np.load(file, allow_pickle=False) as loaded:
            sizes = tuple(loaded["sizes"].tolist())
            places = np.ravel_multi_index(tuple(loaded["prompts"].T), sizes)
            log_probs = np.empty(loaded["log_probs"].shape)
            log_probs[places] = loaded["log_probs"]
            return cls(
                sizes=sizes,
                blanks=tuple(loaded["blanks"].tolist()),
                log_probs=log_probs,
                targets=loaded["targets"].astype(np.int64),
            )

    @classmethod
    def synthetic(cls, seed: int, sizes: tuple[int, ...] = (4, 3, 4, 4), rows: int = 96) -> Table:
        """Make up a model whose slots and pairs of slots sharpen, shift and sway its log-odds."""
        rng = np.random.default_rng(seed)
        targets = np.arange(rows) % 2
        sign = np.where(targets == 1, 1.0, -1.0)
        easy = rng.normal(0.6, 1.0, rows)
        prompts = np.array(list(itertools.product(*map(range, sizes))))
        sharp, shift = np.ones(len(prompts)), np.zeros(len(prompts))
        sway = np.zeros((len(prompts), rows))
        for slot, size in enumerate(sizes):
            at = prompts[:, slot]
            sharp += rng.normal(0.0, 0.35, size)[at]
            shift += rng.normal(0.0, 0.6, size)[at]
            sway += rng.normal(0.0, 0.35, (size, rows))[at]
        for one, two in itertools.combinations(range(len(sizes)), 2):
            at = prompts[:, one] * sizes[two] + prompts[:, two]
            count = sizes[one] * sizes[two]
            sharp += rng.normal(0.0, 0.1, count)[at]
            shift += rng.normal(0.0, 0.2, count)[at]
            sway += rng.normal(0.0, 0.15, (count, rows))[at]
        odds = sharp[:, None] * easy * sign + shift[:, None] + sway
        log_probs = np.stack([-np.logaddexp(0.0, odds), -np.logaddexp(0.0, -odds)], axis=2)
        blanks = (0,) * (len(sizes) - 1) + (-1,)
        return cls(sizes=sizes, blanks=blanks, log_probs=log_probs, targets=targets)

    @property
    def classes(self) -> int:
        """C."""
        return int(self.log_probs.shape[2])

    def losses(self, places: Prompts, rows: Prompts, biases: Numbers) -> Numbers:
        """Cross-entropy of rows under prompts and biases, shape (I, rows, G), nats."""
        odds = self.log_probs[places[:, None], rows][:, :, None] + biases
        top = odds.max(axis=3)
        total = top + np.log(np.exp(odds - top[..., None]).sum(axis=3))
        right = self.targets[rows]
        picked = np.take_along_axis(odds, right[None, :, None, None], axis=3)[..., 0]
        result: Numbers = total - picked
        return result

    def best_biases(self) -> tuple[Numbers, Numbers]:
        """The best bias of each prompt on all rows, (P, C), and its loss there, (P,): Newton."""
        rows, right = np.arange(len(self.targets)), np.eye(self.classes)[self.targets]
        biases = np.zeros((len(self.log_probs), self.classes))
        for _ in range(30):
            odds = self.log_probs + biases[:, None]
            p = np.exp(odds - odds.max(axis=2, keepdims=True))
            p /= p.sum(axis=2, keepdims=True)
            slope = (p - right).mean(axis=1)[:, 1:]
            bend = np.einsum("prc,cd->pcd", p, np.eye(self.classes)) / len(rows)
            bend -= np.einsum("prc,prd->pcd", p, p) / len(rows)
            bend = bend[:, 1:, 1:] + 1e-6 * np.eye(self.classes - 1)
            step = np.linalg.solve(bend, slope[:, :, None])[:, :, 0]
            biases[:, 1:] -= np.clip(step, -1.0, 1.0)
        return biases, self.at(np.arange(len(biases)), biases)

    def at(self, places: Prompts, biases: Numbers) -> Numbers:
        """The loss of prompts on all rows, each at its own bias, shape (I,)."""
        rows = np.arange(len(self.targets))
        pairs = zip(places, biases, strict=True)
        return np.array(
            [self.losses(np.array([at]), rows, bias[None])[0, :, 0].mean() for at, bias in pairs]
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class World:
    """A table with how it is asked."""

    table: Table
    batch: int
    prompts: int
    labels: bool
    dirichlet: float | None = None
    lie: str | None = None

    def __post_init__(self) -> None:
        best, values = self.table.best_biases()
        object.__setattr__(self, "best", best)
        object.__setattr__(self, "values", values)
        reference = tuple(max(blank, 0) for blank in self.table.blanks)
        object.__setattr__(self, "none", self.place(np.array([reference]))[0])

    best: Any = None
    values: Any = None
    none: Any = None

    def place(self, prompts: Prompts) -> Prompts:
        """The rows of prompts in the table; of an older search, candidates beyond a slot's wrap."""
        wrapped = np.asarray(prompts) % np.array(self.table.sizes)
        return np.ravel_multi_index(tuple(wrapped.T), self.table.sizes)

    def method(self, name: str, seed: int, cap: int, race: bool, **options: Any) -> Algorithm:
        """A search that ends at a cap."""
        asks = cap // self.prompts
        racing = int(RACE * asks) if race else 0
        table = self.table
        if "space" in method_options(name):
            blanks = tuple(None if blank < 0 else blank for blank in table.blanks)
            slots = tuple(range(len(table.sizes)))
            options["space"] = Space(sizes=table.sizes, blanks=blanks, slots=slots)
        return make_method(
            name,
            prompt_len=len(table.sizes),
            vocab_size=max(table.sizes),
            num_samples=self.prompts,
            seed=seed,
            biases=bias_grid(table.classes) if self.labels else None,
            search=asks - racing if racing else None,
            race=racing,
            **options,
        )

    def run(self, method: Algorithm, seed: int, cap: int) -> Iterator[tuple[int, Any]]:
        """Queries, and the state after them."""
        rng, state, spent, step = np.random.default_rng(seed), method.init(), 0, 0
        while not method.finished(state):
            wanted = method.wanted(state)
            if spent + wanted > cap:
                break
            candidates = method.ask(state, stream(seed * 10_000 + step), wanted)
            state = method.tell(state, candidates, self.mini_batch(candidates.prompts, rng))
            spent, step = spent + wanted, step + 1
            yield spent, state

    def handed_out(self, method: Algorithm, state: Any) -> float:
        """The loss of the deployable prompt on all rows, at the bias that goes with it."""
        place = self.place(method.prompt(state)[None])
        bias = method.bias(state)
        biases = self.best[place] if bias is None else bias[None]
        return float(self.table.at(place, biases)[0])

    def mini_batch(self, prompts: Prompts, rng: np.random.Generator) -> ClassLosses | Numbers:
        """What one client says of prompts."""
        table, places = self.table, self.place(prompts)
        rows = np.arange(len(table.targets))
        if self.dirichlet is not None:
            share = rng.dirichlet([self.dirichlet] * table.classes)
            chance = share[table.targets] / np.bincount(table.targets)[table.targets]
            few = min(self.batch, int((chance > 1e-9).sum()))
            rows = rng.choice(rows, few, replace=False, p=chance / chance.sum())
        else:
            rows = rng.choice(rows, self.batch, replace=False)
        lies = self.lie is not None and rng.random() < LIARS
        if not self.labels:
            pairs = zip(places, self.best[places], strict=True)
            plain = np.array(
                [table.losses(np.array([at]), rows, b[None])[0, :, 0].mean() for at, b in pairs]
            )
            return LIES[str(self.lie)](plain, rng) if lies else plain
        losses = table.losses(places, rows, np.array(bias_grid(table.classes)))
        counts = np.bincount(table.targets[rows], minlength=table.classes)
        means = np.stack(
            [
                losses[:, table.targets[rows] == c].sum(axis=1) / max(counts[c], 1)
                for c in range(table.classes)
            ],
            axis=1,
        )
        if lies:
            means = LIES[str(self.lie)](means, rng)
        return ClassLosses(means=means, counts=counts)

    def closed(self, loss: float) -> float:
        """The part of the gap that is closed, percent."""
        gap = self.values[self.none] - self.values.min()
        return float(100.0 * (self.values[self.none] - loss) / gap)


def closed_by(world: World, name: str, seeds: range) -> Numbers:
    """Parts of the gap, shape (seeds, marks), percent; `NAME+race` races in the last fifth."""
    kind, _, race = name.partition("+")
    result = np.full((len(seeds), len(MARKS)), np.nan)
    for place, seed in enumerate(seeds):
        if race:
            for at, cap in enumerate(MARKS):
                method = world.method(kind, seed, cap, True)
                *_, (_, state) = world.run(method, seed, cap)
                result[place, at] = world.closed(world.handed_out(method, state))
            continue
        method = world.method(kind, seed, MARKS[-1], False)
        found = dict(world.run(method, seed, MARKS[-1]))
        for at, mark in enumerate(MARKS):
            state = found[max(key for key in found if key <= mark)]
            result[place, at] = world.closed(world.handed_out(method, state))
    return result


def main() -> None:
    """Run the seeds and print Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", type=Path, action="append", default=[])
    parser.add_argument("--synthetic", type=int, action="append", default=[])
    parser.add_argument("--methods", default="random,random+race,thompson,thompson+race")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8, help="rows of a query")
    parser.add_argument("--prompts", type=int, default=5, help="prompts on each mini-batch")
    parser.add_argument("--plain", action="store_true", help="losses at each prompt's best bias")
    parser.add_argument("--dirichlet", type=float, help="of clients' classes; IID without it")
    parser.add_argument("--lie", choices=LIES, help="what a fifth of the clients do")
    parser.add_argument("--json", type=Path, help="where results are added, one line each")
    args = parser.parse_args()
    tables = [(file.stem, Table.load(file)) for file in args.table]
    tables += [(f"synthetic {seed}", Table.synthetic(seed)) for seed in args.synthetic]
    print("| table | method |", *(f"{mark} |" for mark in MARKS), "s/run |")
    print("|---|---|" + "---|" * (len(MARKS) + 1))
    every: dict[str, list[Numbers]] = {}
    for label, table in tables:
        world = World(
            table=table,
            batch=args.batch,
            prompts=args.prompts,
            labels=not args.plain,
            dirichlet=args.dirichlet,
            lie=args.lie,
        )
        for name in args.methods.split(","):
            began = time.perf_counter()
            found = closed_by(world, name, range(args.seeds))
            seconds = (time.perf_counter() - began) / args.seeds
            every.setdefault(name, []).append(found)
            print(row(label, name, found), f"{seconds:.1f} |", flush=True)
            if args.json is not None:
                line = {"table": label, "method": name, "closed": found.tolist(), **vars(args)}
                with args.json.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line, default=str) + "\n")
    if len(tables) > 1:
        for name, parts in every.items():
            print(row("mean", name, np.mean(parts, axis=0)), "|")
    sys.stdout.flush()


def row(label: str, name: str, found: Numbers) -> str:
    """A row of the Markdown table."""
    errors = found.std(axis=0) / np.sqrt(len(found))
    cells = [
        f"{mean:.0f} ±{error:.0f} |" for mean, error in zip(found.mean(0), errors, strict=True)
    ]
    return f"| {label} | {name} | " + " ".join(cells)


if __name__ == "__main__":
    main()
