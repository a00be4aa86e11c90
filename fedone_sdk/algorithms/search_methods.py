"""The search methods: random, Thompson sampling, and Optuna's TPE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedone_sdk.errors import needs_extra

from .prompt_search import Known, PromptSearch


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomSearch(PromptSearch):
    """Makes random prompts near "no prompt". `PromptSearch` has the attributes."""

    def _new(self, known: Known, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
        return self._near(count, rng)


_SPARE = 4
"""Extra draws that replace duplicates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThompsonSampling(PromptSearch):
    """Each prompt of an ask, new or known, minimises one draw from the posterior.

    A draw is one plausible value function of all prompts, given the losses (Thompson 1933; Russo
    et al. 2018). A loss informs about all prompts with some of the same candidates. `PromptSearch`
    has the attributes.

    Each ask also re-evaluates the incumbent (at first the reference): false losses are detected by
    their disagreement with well-known values. With 5 prompts per mini-batch of 8 rows (SmolLM2 and
    Gemma on SST-2, 40 runs), 100 / 300 queries reach 85 / 93 % of the possible improvement, and 70
    / 92 % if a fifth of the clients invert their losses. Asks without the incumbent reach 82 / 96
    and 60 / 89 %. Adding the reference to each mini-batch costs 1 to 4 points.
    """

    def _next(self, known: Known, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
        drawn = self._new(known, count - 1 + _SPARE, rng)
        every = np.concatenate([known.prompts[:1], drawn])
        first = np.sort(np.unique(every, axis=0, return_index=True)[1])
        # Random prompts replace duplicates.
        missing = max(count - len(first), 0)
        chosen = np.concatenate([every[first], self._near(missing, rng)])[:count]
        return np.asarray(chosen, dtype=np.int64)

    def _new(self, known: Known, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
        return self._lowest(known, count, rng)


@dataclass(frozen=True, slots=True, kw_only=True)
class TPE(PromptSearch):
    """Optuna's multivariate TPE (extra `optuna`) suggests prompts, with one category per candidate.

    A trial is a prompt on a mini-batch; its value is the loss there at the prompt's best bias so
    far. TPE treats the level of a mini-batch as noise. Each ask builds a study from the
    observations, and seeds it from the generator. `PromptSearch` has the attributes.

    With successive halving, `Evaluator` chooses the deployable prompt. Without it (`halving` 0),
    as in plain TPE, the prompt with the least mean loss is deployed.
    """

    def __post_init__(self) -> None:
        """Refuse impossible options, and a missing Optuna before any prompt is paid for."""
        super(TPE, self).__post_init__()
        _optuna()

    def _next(self, known: Known, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
        return self._new(known, count, rng)

    def _new(self, known: Known, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
        optuna = _optuna()
        distributions = {
            f"{position:04d}": optuna.distributions.CategoricalDistribution(range(size))
            for position, size in enumerate(self.space.sizes)
        }
        observed = known.evaluator.observed
        trials = [
            optuna.trial.create_trial(
                params=dict(zip(distributions, prompt, strict=True)),
                distributions=distributions,
                value=value,
            )
            for prompt, value in zip(
                observed.prompts[observed.rows].tolist(), self._losses(known).tolist(), strict=True
            )
        ]
        sampler = optuna.samplers.TPESampler(
            multivariate=True, constant_liar=True, seed=int(rng.integers(2**32))
        )
        study = optuna.create_study(sampler=sampler)
        study.add_trials(trials)
        asked = [study.ask(distributions).params for _ in range(count)]
        prompts = np.array([list(params.values()) for params in asked], dtype=np.int64)
        return self.space.compact(prompts)

    def _incumbent(self, known: Known) -> int:
        if self.halving:
            return super(TPE, self)._incumbent(known)
        rows = known.evaluator.observed.rows
        means = np.bincount(rows, self._losses(known)) / np.bincount(rows)
        return int(means.argmin())

    def _losses(self, known: Known) -> NDArray[np.float64]:
        """Return the weighted loss of each evaluation at its prompt's bias, shape (E,)."""
        observed = known.evaluator.observed
        weights = observed.class_share * (observed.examples[observed.batches] > 0)
        values: NDArray[np.float64] = (weights * observed.losses).sum(axis=1) / weights.sum(axis=1)
        return values


def _optuna() -> Any:
    """Import Optuna, and reduce its logging to warnings."""
    with needs_extra("method tpe", "optuna"):
        import optuna
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
