"""The Tree-structured Parzen Estimator of Optuna, the engine of MIPROv2, for comparison."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedone_sdk.errors import needs_extra

from .search import Known, PromptSearch


@dataclass(frozen=True, slots=True, kw_only=True)
class TPE(PromptSearch):
    """New prompts are suggested by Optuna's multivariate TPE, with one category per candidate.

    Requires the extra `optuna`. A trial is a prompt on a mini-batch; its value is the loss there at
    the prompt's best bias so far. TPE treats the level of a mini-batch as noise. Each ask builds a
    study from the observations, and seeds it from the generator.

    With a race, `Evaluator` chooses the deployable prompt. Without one (`race` 0) this is plain
    TPE: the prompt with the least mean loss is deployed.

    Attributes: see `PromptSearch`.

    Raises:
        MissingExtraError: Optuna is not installed.
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

    def _incumbent(self, known: Known) -> int:
        if self.race:
            return super(TPE, self)._incumbent(known)
        rows = known.evaluator.observed.rows
        means = np.bincount(rows, self._losses(known)) / np.bincount(rows)
        return int(means.argmin())

    def _losses(self, known: Known) -> NDArray[np.float64]:
        """Return the weighted loss of each evaluation at its prompt's bias, shape (E,)."""
        observed, losses = known.evaluator.observed, known.evaluator.losses
        weights = observed.class_share * (observed.examples[observed.batches] > 0)
        values: NDArray[np.float64] = (weights * losses).sum(axis=1) / weights.sum(axis=1)
        return values


def _optuna() -> Any:
    """Import Optuna and reduce its logging to warnings.

    Raises:
        MissingExtraError: Optuna is not installed.
    """
    with needs_extra("method tpe", "optuna"):
        import optuna
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
