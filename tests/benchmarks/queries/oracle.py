"""The oracle: the prompt that a long search on the rows of all clients finds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fedone_sdk.comparison.rows import pooled_rows
from fedone_sdk.experiments.experiment import Result, Trial, Workspace
from fedone_sdk.experiments.federated import trial_backend, tuning_federation
from fedone_sdk.experiments.settings import Settings
from fedone_sdk.task import Example, form_of
from tests.benchmarks.queries.label_rows import LabelRows, fitted_bias, targets_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fedone_sdk.backends import LLMBackend
    from fedone_sdk.simulation import Federation
    from fedone_sdk.task import TaskSpec
    from fedone_sdk.vocabulary import Vocabulary

__all__ = ["Effort", "Evaluator", "neighbours", "oracle_trial", "run_oracle", "search"]

Tokens = tuple[int, ...]
"""A prompt without its blanks."""

_BETTER = 5e-4
"""The least loss difference that counts as progress, nats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """The effort of a search.

    Attributes:
        generations: The largest number.
        width: Neighbours of the best prompt that a generation tries.
        children: Crossovers and mutations of the elite that it tries too.
        rows: Rows for comparing all prompts, then for a quarter of them, and so on; afterwards the
            best `finalists` are scored on all rows.
        finalists: Number of prompts scored on all rows.
        elite: Number of parents.
        patience: Generations without progress, after all neighbours of the best were tried, that
            end the search.
    """

    generations: int = 60
    width: int = 400
    children: int = 100
    rows: tuple[int, ...] = (64, 256, 1024)
    finalists: int = 4
    elite: int = 8
    patience: int = 2


def oracle_trial(
    key: str, settings: Settings, task: str, run: dict[str, Any], effort: dict[str, Any]
) -> Trial:
    """Return the trial of a search.

    Args:
        key: Of the trial.
        settings: The user's settings.
        task: The GLUE task of the rows.
        run: Determines the clients' rows and the candidates; its method is not used.
        effort: Attributes of `Effort` that differ from the default.

    Raises:
        SpecError: There is no data for the task.
    """
    return Trial(
        key=key,
        run=run_oracle,
        function="fedone_sdk.experiments.oracle:run_oracle",
        options={"run": run, "seed": run["seed"], "effort": effort},
        inputs=settings.inputs(task),
    )


def run_oracle(options: dict[str, Any], workspace: Workspace) -> Result:
    """Search on the rows of all clients, and measure the result on the dev split.

    Returns:
        The ``prompt`` with its ``bias`` (fitted on all client rows), its ``train_loss`` there, and
        on the dev split ``loss``, ``metric`` and ``accuracy``; ``generations``, ``tried`` prompts,
        ``rows_asked``, and whether the search ``converged`` before its last generation.
    """
    federation = tuning_federation(options, workspace)
    return asyncio.run(_found(federation, options, workspace))


class Evaluator:
    """Evaluates prompts on the first rows, with their best bias there.

    Args:
        backend: The model.
        task: The task.
        vocabulary: The candidates.
        rows: In random order.

    Attributes:
        asked: Rows scored so far.
    """

    def __init__(
        self,
        backend: LLMBackend,
        task: TaskSpec,
        vocabulary: Vocabulary,
        rows: Sequence[Example],
    ) -> None:
        self.asked = 0
        self._backend, self._task, self._vocabulary = backend, task, vocabulary
        self._rows = rows
        self._targets = targets_of(task, rows)
        self._known: dict[Tokens, NDArray[np.float64]] = {}

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._rows)

    @property
    def tried(self) -> int:
        """Number of evaluated prompts."""
        return len(self._known)

    def has_evaluated(self, prompt: Tokens) -> bool:
        """Return whether a prompt was evaluated, on any number of rows."""
        return prompt in self._known

    def text(self, prompt: Tokens) -> str:
        """Return the prompt's text."""
        return self._vocabulary.text(prompt)

    async def loss(self, prompt: Tokens, count: int) -> float:
        """Return the cross-entropy on the first `count` rows, with the best bias there, nats."""
        log_probs, targets = await self._answers(prompt, count), self._targets[:count]
        rows = LabelRows(metric_name="accuracy", log_probs=log_probs, targets=targets)
        return rows.loss(rows.fitted())

    async def bias(self, prompt: Tokens) -> NDArray[np.float64]:
        """Return the best bias on all rows, shape (C,)."""
        return fitted_bias(await self._answers(prompt, len(self)), self._targets)

    async def best(self, prompts: Iterable[Tokens], count: int, keep: int) -> list[Tokens]:
        """Return the `keep` best of some prompts on the first `count` rows, the best first."""
        losses = {prompt: await self.loss(prompt, count) for prompt in prompts}
        return sorted(losses, key=lambda prompt: (losses[prompt], prompt))[:keep]

    async def _answers(self, prompt: Tokens, count: int) -> NDArray[np.float64]:
        known = self._known.get(prompt)
        have = 0 if known is None else len(known)
        if have < count:
            missing = self._rows[have:count]
            new = await LabelRows.ask(self._backend, self._task, self.text(prompt), missing)
            self.asked += len(missing)
            known = new.log_probs if known is None else np.concatenate([known, new.log_probs])
            self._known[prompt] = known
        assert known is not None
        return known[:count]


def neighbours(prompt: Tokens, tokens: Sequence[int], longest: int) -> list[Tokens]:
    """Return all prompts that differ in one token: removed, inserted or replaced."""
    found = {prompt[:place] + prompt[place + 1 :] for place in range(len(prompt))}
    for token in tokens:
        for place in range(len(prompt) + 1):
            if len(prompt) < longest:
                found.add((*prompt[:place], token, *prompt[place:]))
            if place < len(prompt):
                found.add((*prompt[:place], token, *prompt[place + 1 :]))
    return sorted(found - {prompt})


async def search(
    evaluator: Evaluator, *, tokens: Sequence[int], longest: int, effort: Effort, seed: int
) -> tuple[Tokens, int, bool]:
    """Search by greedy coordinate steps and evolution, with races over more and more rows.

    Args:
        evaluator: Evaluates prompts.
        tokens: The candidates, without the blank.
        longest: n.
        effort: The effort of the search.
        seed: Of the draws.

    Returns:
        The best prompt on all rows, the number of generations, and whether the search converged.
    """
    rng = np.random.Generator(np.random.Philox(seed))
    everything = len(evaluator)
    elite: list[Tokens] = [()]
    lowest = await evaluator.loss((), everything)
    still = 0
    for generation in range(effort.generations):
        untried = [
            one for one in neighbours(elite[0], tokens, longest) if not evaluator.has_evaluated(one)
        ]
        if still >= effort.patience and not untried:
            return elite[0], generation, True
        order = rng.permutation(len(untried))[: effort.width]
        children = [_child(elite, tokens, longest, rng) for _ in range(effort.children)]
        field = {untried[row] for row in order} | {
            one for one in children if not evaluator.has_evaluated(one)
        }
        for rows in effort.rows:
            keep = max(effort.finalists, len(field) // 4)
            field = set(await evaluator.best(sorted(field), min(rows, everything), keep))
        last = min(effort.rows[-1], everything)
        finalists = await evaluator.best(sorted(field), last, effort.finalists)
        elite = await evaluator.best({*elite, *finalists}, everything, effort.elite)
        now = await evaluator.loss(elite[0], everything)
        still = 0 if now < lowest - _BETTER else still + 1
        lowest = min(lowest, now)
    return elite[0], effort.generations, False


def _child(
    elite: Sequence[Tokens], tokens: Sequence[int], longest: int, rng: np.random.Generator
) -> Tokens:
    """Return a crossover of two elite prompts, with a mutation or two."""
    mother, father = (elite[int(row)] for row in rng.integers(len(elite), size=2))
    cut = int(rng.integers(max(len(mother), len(father)) + 1))
    child = [*mother[:cut], *father[cut:]]
    for _ in range(int(rng.integers(1, 3))):
        token, place = tokens[int(rng.integers(len(tokens)))], int(rng.integers(len(child) + 1))
        if place < len(child) and rng.random() < 0.5:
            child[place] = token
        else:
            child.insert(place, token)
    while len(child) > longest:
        del child[int(rng.integers(len(child)))]
    return tuple(child)


async def _found(
    federation: Federation, options: dict[str, Any], workspace: Workspace
) -> dict[str, Any]:
    began, spec, vocabulary = time.monotonic(), federation.spec, federation.vocabulary
    effort = Effort(**{**options["effort"], **_rows_of(options["effort"])})
    async with trial_backend(options["run"]["backend"], workspace, keep=False) as backend:
        await backend.check(spec.task.label_words, form_of(spec.task))
        evaluator = Evaluator(backend, spec.task, vocabulary, pooled_rows(federation))
        tokens = [token for token in range(len(vocabulary)) if token != vocabulary.blank]
        prompt, generations, converged = await search(
            evaluator, tokens=tokens, longest=spec.prompt.length, effort=effort, seed=spec.seed
        )
        bias = await evaluator.bias(prompt)
        rows = await LabelRows.ask(backend, spec.task, evaluator.text(prompt), federation.dev)
        model = backend.fingerprint
    return {
        "seed": spec.seed,
        "prompt": evaluator.text(prompt),
        "bias": bias.tolist(),
        "train_loss": await evaluator.loss(prompt, len(evaluator)),
        "no_prompt_train_loss": await evaluator.loss((), len(evaluator)),
        "loss": rows.loss(bias),
        "metric": rows.metric(bias),
        "accuracy": rows.accuracy(bias),
        "generations": generations,
        "converged": converged,
        "tried": evaluator.tried,
        "rows_asked": evaluator.asked,
        "model": model,
        "wall_s": time.monotonic() - began,
    }


def _rows_of(effort: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON form: tuples become lists."""
    return {"rows": tuple(effort["rows"])} if "rows" in effort else {}
