"""Time of an ask and a tell of each search after 1,000 evaluated prompts.

Losses are synthetic: effects of four slots of 40, 20, 8 and 4 candidates, with an intercept per
mini-batch. Times are processor time of one thread.

    OPENBLAS_NUM_THREADS=1 python -m tests.benchmarks.ask_tell
"""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from fedone_sdk.algorithms import ClassLosses, make_method, stream
from fedone_sdk.algorithms.space import Space
from fedone_sdk.calibration import bias_grid

SLOTS = (40, 20, 8, 4)
PROMPTS, EVALUATED, LAST = 10, 1000, 20


def main() -> None:
    """Prints Markdown."""
    print(f"| search | labels | biases | ask, ms | tell, ms |\n{'|---' * 5}|")
    for labels in (2, 4):
        for name in ("thompson", "random"):
            ask, tell = (1000 * np.array(one[-LAST:]) for one in times(name, labels))
            print(
                f"| {name} | {labels} | {len(bias_grid(labels))} "
                f"| {np.median(ask):.0f}, at most {ask.max():.0f} "
                f"| {np.median(tell):.0f}, at most {tell.max():.0f} |",
                flush=True,
            )


def times(name: str, labels: int) -> tuple[list[float], list[float]]:
    """Return the seconds of each ask and each tell, until `EVALUATED` prompts have a loss."""
    rng, grid = np.random.default_rng(0), bias_grid(labels)
    effects = [rng.normal(0.0, 0.1, size) for size in SLOTS]
    method = make_method(
        name,
        prompt_len=len(SLOTS),
        vocab_size=max(SLOTS),
        num_samples=PROMPTS,
        seed=0,
        biases=grid,
        space=Space.of([(1, size, 0) for size in SLOTS]),
    )
    asks, tells, seen, state = list[float](), list[float](), set[tuple[int, ...]](), method.init()
    while len(seen) < EVALUATED:
        began = time.process_time()
        candidates = method.ask(state, stream(len(asks)), method.wanted(state))
        asks.append(time.process_time() - began)
        losses = made_up(candidates.prompts, effects, labels, len(grid), rng)
        began = time.process_time()
        state = method.tell(state, candidates, losses)
        tells.append(time.process_time() - began)
        seen |= set(map(tuple, candidates.prompts.tolist()))
    return asks, tells


def made_up(
    prompts: NDArray[np.int64],
    effects: list[NDArray[np.float64]],
    labels: int,
    biases: int,
    rng: np.random.Generator,
) -> ClassLosses:
    """Return losses of prompts on one mini-batch of 16 examples, least in the grid's middle."""
    counts = rng.multinomial(16, [1.0 / labels] * labels)
    values = sum(own[prompts[:, slot]] for slot, own in enumerate(effects))
    means = 0.6 + values[:, None] + rng.normal(0.0, 0.1, (len(prompts), labels)) + rng.normal()
    curves = means[:, :, None] + 0.1 * np.abs(np.linspace(-2.0, 2.0, biases))
    curves[:, counts == 0] = 0.0
    return ClassLosses(means=curves, counts=counts)


if __name__ == "__main__":
    main()
