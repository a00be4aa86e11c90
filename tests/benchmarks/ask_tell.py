"""Time of an ask and a tell of each search after 1,000 evaluated prompts.

Losses are synthetic: effects of four slots of 40, 20, 8 and 4 candidates, with an intercept per
mini-batch. Times are processor time of one thread.

    OPENBLAS_NUM_THREADS=1 python -m tests.benchmarks.ask_tell
"""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from fedone_sdk.algorithms import Candidates, ClassLosses, make_method, stream
from fedone_sdk.algorithms.space import Space
from fedone_sdk.losses import num_groups

SLOTS = (40, 20, 8, 4)
PROMPTS, EVALUATED, LAST = 10, 1000, 20


def main() -> None:
    """Prints Markdown."""
    print(f"| search | labels | groups | ask, ms | tell, ms |\n{'|---' * 5}|")
    for labels in (2, 4, 64):
        for name in ("thompson", "random"):
            ask, tell = (1000 * np.array(one[-LAST:]) for one in times(name, labels))
            print(
                f"| {name} | {labels} | {num_groups(labels, private=False)} "
                f"| {np.median(ask):.0f}, at most {ask.max():.0f} "
                f"| {np.median(tell):.0f}, at most {tell.max():.0f} |",
                flush=True,
            )


def times(name: str, labels: int) -> tuple[list[float], list[float]]:
    """Return the seconds of each ask and each tell, until `EVALUATED` prompts have a loss."""
    rng, groups = np.random.default_rng(0), num_groups(labels, private=False)
    effects = [rng.normal(0.0, 0.1, size) for size in SLOTS]
    method = make_method(
        name,
        num_samples=PROMPTS,
        seed=0,
        num_labels=labels,
        num_groups=groups,
        space=Space.of([(1, size, 0) for size in SLOTS]),
    )
    asks, tells, seen, state = list[float](), list[float](), set[tuple[int, ...]](), method.init()
    while len(seen) < EVALUATED:
        began = time.process_time()
        candidates = method.ask(state, stream(len(asks)), method.wanted(state))
        asks.append(time.process_time() - began)
        losses = made_up(candidates, effects, groups, rng)
        began = time.process_time()
        state = method.tell(state, candidates, losses)
        tells.append(time.process_time() - began)
        seen |= set(map(tuple, candidates.prompts.tolist()))
    return asks, tells


def made_up(
    candidates: Candidates,
    effects: list[NDArray[np.float64]],
    groups: int,
    rng: np.random.Generator,
) -> ClassLosses:
    """Return losses of prompts on one mini-batch of 16 examples, with random probabilities."""
    assert candidates.biases is not None
    prompts, labels = candidates.prompts, candidates.biases.shape[1]
    drawn = rng.multinomial(16, [1.0 / labels] * labels)
    counts = drawn if groups > 1 else np.array([16])
    values = sum(own[prompts[:, slot]] for slot, own in enumerate(effects))
    losses = 0.6 + values[:, None] + rng.normal(0.0, 0.1, (len(prompts), groups)) + rng.normal()
    probabilities = rng.dirichlet(np.ones(labels), losses.shape)
    traces = 0.8 * (1.0 - (probabilities**2).sum(axis=-1))
    means = np.concatenate([losses[..., None], traces[..., None], probabilities], axis=-1)
    means[:, counts == 0] = 0.0
    targets = np.eye(labels) if groups > 1 else drawn[None] / 16
    return ClassLosses(means=means, counts=counts, targets=targets, biases=candidates.biases)


if __name__ == "__main__":
    main()
