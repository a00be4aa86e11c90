"""Searches with sampled answers instead of log-probabilities, on tables of real models.

    python -m tests.benchmarks.sampled

The tables of docs/benchmarks/slot-tables hold the label log-probabilities of SmolLM2 and Gemma for
every prompt and row. Answers at temperature 1 are draws from them, restricted to the labels as by a
JSON schema, so hiding the log-probabilities needs no model. Each budget is a run of its own.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean

import numpy as np

from fedone_sdk.backends.completions import FIRST, estimated
from fedone_sdk.task import LOG_ZERO
from tests.benchmarks.slot_cells import CELLS as ALL_CELLS
from tests.benchmarks.slot_runs import (
    TABLES,
    Contestant,
    Federation,
    Floats,
    Measured,
    Table,
    trial,
)

CELLS = ("smollm2-sst2", "smollm2-feedback", "gemma-sst2", "gemma-bbc")
BUDGETS = (100, 200, 300, 600)
TARGETS = (100, 200, 300)
PROMPT_TOKENS, ANSWER_TOKENS = 150, 8
"""Tokens of an input, and of an answer as JSON."""
SHOT_CHARS = 150
"""Characters of a demonstrated example, about."""
PROMPT_USD, COMPLETION_USD = 0.10, 0.50
"""gpt-6-luna, per million tokens."""


class Unbiased(Table):
    """Log-probabilities without a label bias: what a written answer of the deployed prompt is."""

    answers: np.ndarray | None = None

    def _measured_best(self, prompt: int) -> Measured:
        return self.measured(prompt, np.zeros(self.num_labels))


class Sampled(Unbiased):
    """Estimates from up to `samples` answers per prompt and row.

    Attributes:
        answers: Number of answers, shape (prompts, rows).
    """

    def __init__(self, file: Path, samples: int, seed: int) -> None:
        super().__init__(file)
        rng = np.random.default_rng(seed)
        odds = np.exp(self.log_probs - self.log_probs.max(axis=2, keepdims=True))
        chances = odds / odds.sum(axis=2, keepdims=True)
        first = rng.multinomial(FIRST, chances)
        agree = first.max(axis=2, keepdims=True) == FIRST
        counts = first + np.where(agree, 0, rng.multinomial(samples - FIRST, chances))
        self.answers = counts.sum(axis=2)
        of = {
            tuple(row): estimated((*row, sum(row)))
            for row in set(map(tuple, counts.reshape(-1, self.num_labels).tolist()))
        }
        self.log_probs = np.array(
            [of[tuple(row)] for row in counts.reshape(-1, self.num_labels).tolist()]
        ).reshape(counts.shape)


class Brier(Sampled):
    """The same estimates, with the Brier score as loss."""

    def _cross_entropy(self, values: Floats, bias: Floats) -> Floats:
        true = np.eye(self.num_labels)[self.targets]
        found: Floats = ((np.exp(values) - true) ** 2).sum(axis=-1)
        return found


class ZeroOne(Unbiased):
    """One answer at temperature 0, which is right or wrong."""

    def __init__(self, file: Path) -> None:
        super().__init__(file)
        best = self.log_probs.max(axis=2, keepdims=True)
        self.log_probs = np.where(self.log_probs == best, 0.0, LOG_ZERO)

    def _cross_entropy(self, values: Floats, bias: Floats) -> Floats:
        found: Floats = (values.argmax(axis=-1) != self.targets).astype(np.float64)
        return found


BIASED = Contestant(label="", name="thompson")
PLAIN = Contestant(label="", name="thompson", calibrates=False, own_bias=True)
Variant = tuple[Callable[[Path, int], Table], Contestant]
VARIANTS: dict[str, Variant] = {
    "log-probabilities, label bias": (lambda file, _: Table(file), BIASED),
    "log-probabilities": (lambda file, _: Unbiased(file), PLAIN),
    **{f"{n} samples": ((lambda file, seed, n=n: Sampled(file, n, seed)), PLAIN) for n in (5, 8)},
    "8 samples, label bias": (lambda file, seed: Sampled(file, 8, seed), BIASED),
    "8 samples, Brier": (lambda file, seed: Brier(file, 8, seed), PLAIN),
    "zero_one": (lambda file, _: ZeroOne(file), PLAIN),
}


def runs(file: Path, name: str, queries: int, seed: int) -> dict[str, float]:
    """Run once; measure the deployed prompt on all rows by the true log-probabilities."""
    make, contestant = VARIANTS[name]
    table, true = make(file, seed), Table(file)
    found = trial(contestant, Federation(table=table, clients=8, batch_size=16, seed=seed), queries)
    prompt = int(true.rows_of(np.array([found["prompt"]]))[0])
    bias = np.array(found["bias"]) if contestant.calibrates else np.zeros(true.num_labels)
    measured, none = (
        true.measured(prompt, bias),
        true.measured(true.none, np.zeros(true.num_labels)),
    )
    calls, pairs = found["new_rows"], found["pairs"]
    per_pair = getattr(table, "answers", None)
    answers = calls if per_pair is None else int(sum(per_pair[at] for at in pairs))
    usd = (calls * PROMPT_TOKENS * PROMPT_USD + answers * ANSWER_TOKENS * COMPLETION_USD) / 1e6
    if "log-prob" in name:
        usd = calls * (PROMPT_TOKENS * PROMPT_USD + COMPLETION_USD) / 1e6
    elif per_pair is not None:
        # A second request for the rows whose first answers differ.
        usd += sum(per_pair[at] > FIRST for at in pairs) * PROMPT_TOKENS * PROMPT_USD / 1e6
    return {
        "accuracy": 100 * measured.accuracy,
        "loss": measured.loss,
        "none": 100 * none.accuracy,
        "calls": calls,
        "answers": answers,
        "usd": float(usd),
    }


def main() -> None:
    """Run what is missing, and print Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", nargs="*", default=[*CELLS])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--trials", type=Path, default=Path("sampled-trials.jsonl"))
    args = parser.parse_args()
    known = {}
    if args.trials.is_file():
        for line in args.trials.read_text(encoding="utf-8").splitlines():
            key, found = json.loads(line)
            known[tuple(key)] = found
    keys = [
        (cell, name, queries, seed)
        for seed in range(args.seeds)
        for cell in args.cells
        for name in VARIANTS
        for queries in BUDGETS
        if queries in TARGETS or "log-prob" not in name
    ]
    with args.trials.open("a", encoding="utf-8") as out:
        for key in keys:
            if key not in known:
                cell, name, queries, seed = key
                known[key] = runs(TABLES / f"{cell}.npz", name, queries, seed)
                out.write(json.dumps([key, known[key]]) + "\n")
                out.flush()
    print("\n".join([*report({key: known[key] for key in keys}), "", *lengths(args.cells)]))


def report(known: dict[tuple[str, str, int, int], dict[str, float]]) -> Iterator[str]:
    """Lines of Markdown."""

    def mean(name: str, queries: int, what: str) -> float:
        return fmean(one[what] for key, one in known.items() if key[1:3] == (name, queries))

    for title, what, form in ("accuracy, %", "accuracy", ".1f"), ("loss, nats", "loss", ".3f"):
        yield f"| {title} | " + " | ".join(f"{queries}" for queries in BUDGETS) + " |"
        yield "|---" * (1 + len(BUDGETS)) + "|"
        for name in VARIANTS:
            cells = [f"{mean(name, q, what):{form}}" if _is_run(name, q) else "" for q in BUDGETS]
            yield f"| {name} | " + " | ".join(cells) + " |"
        yield ""
    yield (
        "| to reach log-probabilities at | "
        + " | ".join(f"{queries}" for queries in TARGETS)
        + " |"
    )
    yield "|---" * (1 + len(TARGETS)) + "|"
    for name in VARIANTS:
        cells = [reached(name, mean, mean("log-probabilities", q, "accuracy")) for q in TARGETS]
        yield f"| {name} | " + " | ".join(cells) + " |"


def reached(name: str, mean: Callable[[str, int, str], float], target: float) -> str:
    """Return what it takes until the mean accuracy reaches a target."""
    budgets = [queries for queries in BUDGETS if _is_run(name, queries)]
    right = [mean(name, queries, "accuracy") for queries in budgets]
    best: Sequence[float] = np.maximum.accumulate(right).tolist()
    if best[-1] < target:
        return f"not with {budgets[-1]} queries"

    def at(values: Sequence[float]) -> float:
        return float(np.interp(target, best, values))

    calls, answers, usd = (
        at([mean(name, q, what) for q in budgets]) for what in ("calls", "answers", "usd")
    )
    return f"{at(budgets):.0f} queries, {calls:.0f} calls, {answers:.0f} answers, USD {usd:.3f}"


def lengths(cells: Sequence[str]) -> Iterator[str]:
    """Lines of Markdown: the prompt of least loss with a penalty for each token (4 characters)."""
    yield "| table | length_penalty | tokens | loss | accuracy | USD per million calls |"
    yield "|---|---|---|---|---|---|"
    for name in cells:
        table, cell = Table(TABLES / f"{name}.npz"), ALL_CELLS[name]
        best = [table.best(prompt) for prompt in range(len(table.prompts))]
        tokens = [
            (len(cell.instructions[i]) + len(cell.closings[c]) + SHOT_CHARS * len(cell.shots[s]))
            / 4
            for i, s, c, _ in table.prompts.tolist()
        ]
        for penalty in (0.0, 0.0002, 0.001, 0.005):
            at = min(range(len(best)), key=lambda one: best[one].loss + penalty * tokens[one])
            found, usd = best[at], tokens[at] * PROMPT_USD
            values = (
                f"{tokens[at]:.0f} | {found.loss:.3f} | {100 * found.accuracy:.1f} % | {usd:.2f}"
            )
            yield f"| {name} | {penalty:g} | {values} |"


def _is_run(name: str, queries: int) -> bool:
    return queries in TARGETS or "log-prob" not in name


if __name__ == "__main__":
    main()
