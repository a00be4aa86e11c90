from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

import numpy as np

from fedone_sdk.task import Rendered, TaskSpec
from fedone_sdk.testing import ScriptedBackend
from fedone_sdk.vocabulary import Vocabulary
from tests.benchmarks.queries.oracle import Effort, Evaluator, neighbours, search

TASK = TaskSpec(template="{prompt} {text} {mask}", labels={"0": " no", "1": " yes"})
VOCABULARY = Vocabulary(candidates=("", " a", " b", " c", " d", " e"))
TOKENS, LONGEST = (1, 2, 3, 4, 5), 3
SHARPER = {" a": 0.3, " b": -0.2, " c": 0.5, " d": 0.1, " e": -0.4}
ROWS = [{"text": f"{number}", "label": number % 2} for number in range(48)]


def answer(rendered: Rendered, words: Sequence[str]) -> tuple[float, ...]:
    """Better with every good token, best with c before a; and a preference for one label."""
    prompt = "".join(part.text for part in rendered if part.kind == "prompt")
    number = int("".join(part.text for part in rendered if part.kind == "field"))
    help_ = sum(SHARPER[f" {token}"] for token in prompt.split()) + ("c a" in prompt)
    odds = (0.5 + help_) * (1 if number % 2 else -1) + 2.0 + 0.3 * (number % 5)
    return -float(np.logaddexp(0.0, odds)), -float(np.logaddexp(0.0, -odds))


def evaluator() -> Evaluator:
    return Evaluator(ScriptedBackend(answer), TASK, VOCABULARY, ROWS)


def test_neighbours_differ_in_one_token() -> None:
    assert neighbours((), (1, 2), 2) == [(1,), (2,)]
    found = neighbours((1, 2), (1, 2), 2)
    assert found == [(1,), (1, 1), (2,), (2, 2)]
    assert (2, 1, 2) in neighbours((1, 2), (1, 2), 3)


def test_asks_only_for_rows_that_it_does_not_know() -> None:
    judge = evaluator()

    async def ask() -> None:
        few = await judge.loss((1,), 16)
        assert judge.asked == 16
        await judge.loss((1,), 48)
        assert judge.asked == 48
        assert await judge.loss((1,), 16) == few
        assert judge.asked == 48

    asyncio.run(ask())


def test_finds_the_best_of_all_prompts() -> None:
    effort = Effort(
        generations=40, width=30, children=10, rows=(8, 24), finalists=4, elite=4, patience=2
    )

    async def compare() -> None:
        judge = evaluator()
        found, _, converged = await search(
            judge, tokens=TOKENS, longest=LONGEST, effort=effort, seed=0
        )
        everything = [
            prompt
            for length in range(LONGEST + 1)
            for prompt in itertools.product(TOKENS, repeat=length)
        ]
        (best,) = await evaluator().best(everything, len(ROWS), 1)
        assert await judge.loss(found, len(ROWS)) == await judge.loss(best, len(ROWS))
        assert converged
        assert judge.tried <= len(everything)
        # Calibrated: the preference for a label is no handicap.
        assert await judge.loss(found, len(ROWS)) < await judge.loss((), len(ROWS)) - 0.1

    asyncio.run(compare())


def test_ends_at_its_last_generation() -> None:
    effort = Effort(generations=1, width=3, children=0, rows=(8,), finalists=2, elite=2)
    found, generations, converged = asyncio.run(
        search(evaluator(), tokens=TOKENS, longest=LONGEST, effort=effort, seed=0)
    )
    assert (generations, converged) == (1, False)
    assert len(found) <= 1
