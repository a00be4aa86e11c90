"""Gain of the quickstart: its run over several seeds, scored on the dev split.

All settings come from the quickstart's RUN.yaml. The interval is a paired bootstrap over seeds and
examples.

    python tests/benchmarks/quickstart.py [--seeds 5] [--model roberta-mini | --words]

With ``--words``, three PMI words before the answer replace the three slots.
"""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import structlog
from numpy.typing import NDArray

from fedone_sdk import RunSpec, assets
from fedone_sdk.aggregator import ServedRun
from fedone_sdk.backends import LLMBackend, predict
from fedone_sdk.backends.build import build_backend
from fedone_sdk.candidates import no_prompt
from fedone_sdk.local import Federation, simulate
from fedone_sdk.losses import predicted
from fedone_sdk.task import Bias, TextPrompt, target_of

RESAMPLES = 10_000

WORDS = {
    "chat": {"user": "{text}", "assistant": "{prompt}"},
    "prompt": {"length": 3, "vocabulary": {"kind": "pmi", "size": 50, "blank": True}},
}
"""The same model and label words with PMI candidates."""

Hits = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """Per dev example whether each prompt's prediction is correct, shape (D,)."""

    no_prompt: Hits
    biased: Hits
    before: Hits
    after: Hits


def main() -> None:
    """Run the seeds and print Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--model", choices=("smollm2", "roberta-mini"), default="smollm2")
    parser.add_argument("--words", action="store_true", help="PMI words in place of slots")
    args = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    print(
        "| seed | no prompt | no prompt, with its label bias | untrained prompt | tuned prompt "
        "| queries | billed | wall s | prompt |\n|---|---|---|---|---|---|---|---|---|"
    )
    name = "quickstart-mini.yaml" if args.model == "roberta-mini" else "quickstart.yaml"
    path = assets.path(name)
    spec = RunSpec.load(path)
    if args.words:
        spec = with_words(spec)
    scored = [asyncio.run(one_seed(spec, path.parent, seed)) for seed in range(args.seeds)]
    before = np.stack([one.after - one.before for one in scored])
    none = np.stack([one.after - one.no_prompt for one in scored])
    fair = np.stack([one.after - one.biased for one in scored])
    print(f"\ntuned prompt - untrained prompt: {interval(before)}")
    print(f"tuned prompt - no prompt: {interval(none)}")
    print(f"tuned prompt - no prompt, with its label bias: {interval(fair)}")


def with_words(spec: RunSpec) -> RunSpec:
    """Return the run with words instead of slots."""
    plain = spec.model_dump(mode="json", exclude_unset=True)
    plain["task"] |= {"chat": WORDS["chat"], "slots": []}
    return RunSpec.model_validate({**plain, "prompt": WORDS["prompt"]})


async def one_seed(spec: RunSpec, folder: Path, seed: int) -> Scored:
    """Run once, and score its prompts on the dev split."""
    spec = spec.model_copy(update={"seed": seed})
    federation = Federation.load(spec, folder)
    async with build_backend(spec.backend, folder) as backend:
        served: list[ServedRun] = []
        result = await simulate(
            federation, backend=backend, watch=lambda run, _: served.append(run)
        )
        run, bare = served[-1], no_prompt(spec.task, federation.vocabulary)
        untrained = run.prompt(run.machine.initial_state()).prompt
        no, biased, before, after = [
            await hits(backend, federation, prompt, bias)
            for prompt, bias in (
                (bare, None),
                (bare, run.machine.plain_bias(run.state)),
                (untrained, None),
                (result.prompt.prompt, result.prompt.bias),
            )
        ]
    assert result.spent.queries <= (result.cap.queries or 0)
    print(
        f"| {seed} | {no.mean():.3f} | {biased.mean():.3f} | {before.mean():.3f} "
        f"| {after.mean():.3f} "
        f"| {result.spent.queries}/{result.cap.queries} "
        f"| {result.spent.requests - result.evaluation.requests} | {result.wall_s:.1f} "
        f"| {result.prompt.prompt!r} |",
        flush=True,
    )
    return Scored(no_prompt=no, biased=biased, before=before, after=after)


async def hits(
    backend: LLMBackend, federation: Federation, prompt: TextPrompt, bias: Bias | None
) -> Hits:
    """Return which dev examples a prompt predicts correctly."""
    task, size = federation.spec.task.with_bias(bias), federation.spec.method.batch_size
    found = await predict(backend, task, prompt, federation.dev, size)
    return np.array(
        [
            float(predicted(found.task, row) == target_of(found.task, example))
            for row, example in found.scored
            if not isinstance(row, str)
        ]
    )


def interval(differences: Hits) -> str:
    """Format mean and 95 % interval of paired differences, shape (seeds, D), in points."""
    rng = np.random.default_rng(0)
    seeds, examples = differences.shape
    means = []
    for _ in range(RESAMPLES):
        rows, columns = rng.integers(seeds, size=seeds), rng.integers(examples, size=examples)
        means.append(differences[np.ix_(rows, columns)].mean())
    low, high = np.percentile(means, [2.5, 97.5])
    return f"{100 * differences.mean():+.1f} points, 95 % [{100 * low:+.1f}, {100 * high:+.1f}]"


if __name__ == "__main__":
    main()
