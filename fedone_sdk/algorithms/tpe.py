"""The Tree-structured Parzen Estimator of Optuna, the engine of MIPROv2: a peer to measure by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .search import Known, PromptSearch

__all__ = ["TPE"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TPE(PromptSearch):
    """New prompts are what Optuna's TPE suggests, multivariate, with a category per candidate.

    It needs the extra `optuna`. A trial is a prompt on a mini-batch, and its value the loss there
    at the prompt's best bias so far. The level of a mini-batch is noise to TPE. Each ask builds the
    study from what was observed, and seeds it from the generator.

    With a race, `Evaluator` chooses the deployable prompt. Without one (`race` 0) this is plain
    TPE: the prompt with the least mean loss is deployed.

    Attributes: see `PromptSearch`.
    """

    def _next(self, known: Known, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
        return self._new(known, count, rng)

    def _new(self, known: Known, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
        optuna = _optuna()
        distributions = {
            f"{position:04d}": optuna.distributions.CategoricalDistribution(range(size))
            for position, size in enumerate(self._space.sizes)
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
        return self._space.compact(prompts)

    def _leader(self, known: Known) -> int:
        if self.race:
            return super(TPE, self)._leader(known)
        rows = known.evaluator.observed.rows
        means = np.bincount(rows, self._losses(known)) / np.bincount(rows)
        return int(means.argmin())

    def _losses(self, known: Known) -> NDArray[np.float64]:
        """The loss of each look at its prompt's bias, classes by their share, shape (E,)."""
        observed, losses = known.evaluator.observed, known.evaluator.losses
        weights = observed.class_share * (observed.examples[observed.batches] > 0)
        values: NDArray[np.float64] = (weights * losses).sum(axis=1) / weights.sum(axis=1)
        return values


def _optuna() -> Any:
    """Optuna, quiet.

    Raises:
        ImportError: It is not installed.
    """
    try:
        import optuna
    except ImportError as exc:
        raise ImportError(
            "method tpe needs the extra `optuna`: pip install 'fedone-sdk[optuna]'"
        ) from exc
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
