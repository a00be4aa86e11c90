"""What the quickstart gains: its run over several seeds, scored on the dev split.

Every setting stands in the quickstart's own file; this script only runs and counts. The
interval is a paired bootstrap over seeds and examples.

    python tests/benchmarks/quickstart.py [--seeds 5] [--model mini]
"""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import dataclass

import numpy as np
import structlog
from numpy.typing import NDArray

from fedone_sdk import RunSpec, assets
from fedone_sdk.aggregator import ServedRun
from fedone_sdk.algorithms import method_from_spec
from fedone_sdk.backends import LLMBackend, predict
from fedone_sdk.backends.build import build_backend
from fedone_sdk.simulation import Federation, simulate
from fedone_sdk.task import Bias, predicted, target_of

RESAMPLES = 10_000

Hits = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """Per dev example whether each prompt got it right, shape (D,)."""

    no_prompt: Hits
    biased: Hits
    before: Hits
    after: Hits


def main() -> None:
    """Runs the seeds and prints Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--model", choices=("smollm2", "mini"), default="smollm2")
    args = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    print(
        "| seed | no prompt | with bias | untrained | tuned | queries | billed | wall s | prompt |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    scored = [asyncio.run(one_seed(args.model, seed)) for seed in range(args.seeds)]
    before = np.stack([one.after - one.before for one in scored])
    none = np.stack([one.after - one.no_prompt for one in scored])
    fair = np.stack([one.after - one.biased for one in scored])
    print(f"\ntuned - untrained: {interval(before)}")
    print(f"tuned - no prompt: {interval(none)}")
    print(f"tuned - no prompt with its bias: {interval(fair)}")


async def one_seed(model: str, seed: int) -> Scored:
    """One run over HTTP, and its three prompts on the dev split."""
    path = assets.path("quickstart-mini.yaml" if model == "mini" else "quickstart.yaml")
    spec = RunSpec.load(path).model_copy(update={"seed": seed})
    federation = Federation.load(spec, path.parent)
    method = method_from_spec(
        spec.method,
        prompt_len=spec.prompt.length,
        vocab_size=len(federation.vocabulary),
        blank=federation.vocabulary.blank,
        seed=seed,
    )
    untrained = federation.vocabulary.text(method.prompt(method.init()).tolist())
    async with build_backend(spec.backend, path.parent) as backend:
        served: list[ServedRun] = []
        result = await simulate(
            federation,
            backend=backend,
            transport="http",
            watch=lambda run, _: served.append(run),
        )
        plain_bias = served[-1].machine.plain_bias(served[-1].state)
        no_prompt, biased, before, after = [
            await hits(backend, federation, text, bias)
            for text, bias in (
                ("", None),
                ("", plain_bias),
                (untrained, None),
                (result.prompt.text, result.prompt.bias),
            )
        ]
    assert result.spent.queries <= (result.cap.queries or 0)
    print(
        f"| {seed} | {no_prompt.mean():.3f} | {biased.mean():.3f} | {before.mean():.3f} "
        f"| {after.mean():.3f} "
        f"| {result.spent.queries}/{result.cap.queries} "
        f"| {result.spent.requests - result.evaluation.requests} | {result.wall_s:.1f} "
        f"| `{result.prompt.text}` |",
        flush=True,
    )
    return Scored(no_prompt=no_prompt, biased=biased, before=before, after=after)


async def hits(backend: LLMBackend, federation: Federation, prompt: str, bias: Bias | None) -> Hits:
    """Which dev examples a prompt gets right."""
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
    """Mean and 95 % interval of paired differences, shape (seeds, D), in points."""
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
