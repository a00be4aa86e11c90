"""Searches over whole prompts on synthetic prompt effects, at a second per run.

A model answers 1024 SST-2 training rows (512 of each class) without a prompt and with each single
candidate, once (5 minutes on one core). The log-odds of a longer prompt are the sum of its tokens'
effects. The real methods search with mini-batches of these rows, calibrated by labels. Their
deployable prompts are compared with no prompt and the best bias, on all rows. Real tokens do not
add up, so the results say nothing about the model. They show defects of a search, on seeds and rows
that no report uses.

    python -m tests.benchmarks.searches --table FILE --model FOLDER --train sst2/train.jsonl
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedone_sdk import OnnxBackend, TaskSpec
from fedone_sdk.algorithms import ClassLosses, make_method, stream
from fedone_sdk.algorithms.calibration import BiasGrid
from fedone_sdk.algorithms.search import PromptSearch
from fedone_sdk.backends import predict
from fedone_sdk.calibration import bias_grid
from fedone_sdk.task import Example
from fedone_sdk.vocabulary import PmiVocabulary, build_vocabulary

PAIRS = ((" terrible", " great"), (" boring", " hilarious"), (" bad", " good"))
PER_CLASS, CANDIDATES, LENGTH, BLANK = 512, 200, 8, 0
ASKS, RACE, PROMPTS, BATCH = 50, 10, 10, 32
MARKS = (5, 10, 20, 40, 50)
GRID = BiasGrid(bias_grid(2))
OFFSETS = GRID.biases[:, 1]

Rows = NDArray[np.float64]


def main() -> None:
    """Run the seeds and print Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", type=Path, required=True, help="answers; created if absent")
    parser.add_argument("--model", type=Path, help="folder of an ONNX model")
    parser.add_argument("--train", type=Path, help="rows with `sentence` and `label`")
    parser.add_argument("--methods", default="thompson")
    parser.add_argument("--seeds", type=int, default=24)
    parser.add_argument("--dirichlet", type=float, help="of clients' classes; IID without it")
    args = parser.parse_args()
    if not args.table.is_file():
        text = args.train.read_text(encoding="utf-8")
        rows = [json.loads(line) for line in text.splitlines() if line]
        asyncio.run(make_table(args.table, args.model, rows))
    odds = load(args.table)
    print("| method | label words |", *(f"{mark * PROMPTS} queries |" for mark in MARKS), "worst |")
    print("|---|---|" + "---|" * (len(MARKS) + 1))
    for name in args.methods.split(","):
        for pair, words in enumerate(PAIRS):
            world = World(odds[pair], args.dirichlet)
            found = np.array([world.run(name, seed) for seed in range(args.seeds)])
            pairs = zip(found.mean(axis=0), found.std(axis=0) / np.sqrt(args.seeds), strict=True)
            cells = [f"{mean:+.4f} ({error:.4f}) |" for mean, error in pairs]
            print(f"| {name} |{' /'.join(words)} |", *cells, f"{found[:, -1].max():+.4f} |")


async def make_table(file: Path, model: Path, rows: list[Example]) -> None:
    """Score rows with each candidate; the first is blank (no prompt)."""
    found = PmiVocabulary(size=CANDIDATES, blank=True)
    vocabulary = build_vocabulary(found, [str(row["sentence"]) for row in rows])
    random.Random(0).shuffle(rows)
    apart = [[row for row in rows if row["label"] == label][:PER_CLASS] for label in (1, 0)]
    words = {str(place): word for place, word in enumerate(itertools.chain(*PAIRS))}
    task = TaskSpec(template="{prompt} {sentence} It was {mask}.", labels=words)
    rows = [*itertools.chain(*apart)]
    backend = OnnxBackend(model, threads=1)
    texts = [vocabulary.text((token,)) for token in range(len(vocabulary))]
    answers = [(await predict(backend, task, text, rows, 32)).rows for text in texts]
    await backend.aclose()
    np.savez(file, log_probs=np.array(answers, dtype=np.float32))


def load(file: Path) -> Rows:
    """Return the log-odds of each pair's second word, shape (pairs, tokens, rows)."""
    with np.load(file, allow_pickle=False) as table:
        log_probs = table["log_probs"].astype(np.float64)
    odds: Rows = np.moveaxis(log_probs[:, :, 1::2] - log_probs[:, :, ::2], 2, 0)
    return odds


@dataclass(frozen=True)
class World:
    """A model whose token effects add up.

    Attributes:
        odds: Log-odds of the positive word by token (the first is blank) and row (the first half
            is positive).
        dirichlet: Concentration of clients' classes; None is equally many of each.
    """

    odds: Rows
    dirichlet: float | None

    def run(self, name: str, seed: int) -> list[float]:
        """Return a search's loss minus that of calibrated no prompt, at each of `MARKS`, nats."""
        method = make_method(
            name,
            prompt_len=LENGTH,
            vocab_size=len(self.odds),
            num_samples=PROMPTS,
            seed=seed,
            blank=BLANK,
            biases=bias_grid(2),
            search=ASKS - RACE,
            race=RACE,
        )
        assert isinstance(method, PromptSearch)
        rng, state, found = np.random.default_rng(seed), method.init(), []
        none = min(self.loss((), bias) for bias in np.linspace(-4.0, 4.0, 161))
        for step in range(ASKS):
            candidates = method.ask(state, stream(seed * ASKS + step), method.wanted(state))
            state = method.tell(state, candidates, self.mini_batch(candidates.prompts, rng))
            if step + 1 in MARKS:
                bias = method.bias(state)
                assert bias is not None
                found.append(self.loss(tuple(method.prompt(state)), float(bias[1])) - none)
        return found

    def log_odds(self, prompt: tuple[int, ...] | NDArray[np.int64]) -> Rows:
        """Return the log-odds of each row with a prompt; a token counts once."""
        tokens = sorted({int(token) for token in prompt} - {BLANK})
        bare = self.odds[BLANK]
        said: Rows = bare + (self.odds[tokens] - bare).sum(axis=0)
        return said

    def loss(self, prompt: tuple[int, ...], bias: float) -> float:
        """Return the cross-entropy on all rows, nats."""
        return float(losses(self.log_odds(prompt), np.array([bias])).mean())

    def mini_batch(self, prompts: NDArray[np.int64], rng: np.random.Generator) -> ClassLosses:
        """Return one client's losses of prompts."""
        positive = BATCH // 2
        if self.dirichlet is not None:
            share = rng.dirichlet([self.dirichlet] * 2)[0]
            positive = int(rng.binomial(BATCH, share))
        counts = np.array([BATCH - positive, positive])
        rows = [PER_CLASS + rng.choice(PER_CLASS, counts[0], replace=False)]
        rows.append(rng.choice(PER_CLASS, counts[1], replace=False))
        means = np.zeros((len(prompts), 2, len(OFFSETS)))
        for place, prompt in enumerate(prompts):
            all_losses = losses(self.log_odds(prompt), OFFSETS)
            for label in np.flatnonzero(counts):
                means[place, label] = all_losses[rows[label]].mean(axis=0)
        return ClassLosses(means=means, counts=counts)


def losses(odds: Rows, biases: NDArray[np.float64]) -> Rows:
    """Return the cross-entropy of each row with each bias, nats, shape (rows, biases)."""
    sign = np.where(np.arange(len(odds)) < PER_CLASS, -1.0, 1.0)
    return np.logaddexp(0.0, sign[:, None] * (odds[:, None] + biases))


if __name__ == "__main__":
    main()
