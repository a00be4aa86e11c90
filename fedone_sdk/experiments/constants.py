"""The constants of the query analysis, estimated at the start of a run."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING, Any

from fedone_sdk.errors import BackendError, SpecError
from fedone_sdk.experiments.experiment import Result, Trial, Workspace
from fedone_sdk.experiments.federated import (
    Tuning,
    method_of,
    trial_backend,
    tuning_federation,
    tuning_trial,
)
from fedone_sdk.experiments.probe import Probe, Probing
from fedone_sdk.experiments.settings import Settings
from fedone_sdk.experiments.summary import mean_sd

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from fedone_sdk.algorithms import Algorithm
    from fedone_sdk.backends import LLMBackend
    from fedone_sdk.simulation import Federation

__all__ = ["constants_trial", "estimate_constants"]


def constants_trial(
    key: str, settings: Settings, tuning: Tuning, probing: Probing, *, visits: int, groups: int
) -> Trial:
    """The trial that estimates a run's constants.

    Args:
        key: Of the trial.
        settings: What the user asked for.
        tuning: The run.
        probing: How alpha is measured.
        visits: Clients that are asked, each about the untrained alpha.
        groups: Sums of visits' updates along which the curvature is measured.

    Raises:
        SpecError: There is no data for the task, or no such run.
    """
    plain = tuning_trial(key, settings, tuning)
    options = {
        **plain.options,
        "probing": dataclasses.asdict(probing),
        "visits": visits,
        "groups": groups,
    }
    return dataclasses.replace(plain, run=estimate_constants, options=options)


def estimate_constants(options: dict[str, Any], workspace: Workspace) -> Result:
    """Asks clients about the untrained alpha, again and again, and looks at what they would do.

    The analysis writes a round as alpha - eta g. Whatever the optimiser, g is taken as (alpha -
    the client's next alpha) / eta: with AdamW that is its normalised step.

    Args:
        options: As of `run_tuning`, and ``probing``, ``visits``, ``groups``.
        workspace: As of `run_tuning`.

    Returns:
        ``variance``: V, of g between visits (clients and prompts together), summed over entries.
        ``squared_gradient``: of the mean of g, without the bias that V puts in; may be negative.
        ``curvature`` and ``curvature_error``: the mean over groups of u' H u / u' u along sums u
        of updates, by central differences of the expected loss, and its standard error. ``loss``:
        the expected loss of the untrained alpha.
    """
    federation = tuning_federation(options, workspace)
    return asyncio.run(_estimate(federation, options, workspace))


async def _estimate(
    federation: Federation, options: dict[str, Any], workspace: Workspace
) -> Result:
    import numpy as np

    from fedone_sdk.algorithms import State
    from fedone_sdk.algorithms.trained import Trained

    spec = federation.spec
    rate: float = options["run"]["method"]["learning_rate"]
    method = method_of(federation)
    if isinstance(method, Trained):
        raise SpecError("method: is trained; these constants are of methods that ask")
    async with trial_backend(spec.backend.model_dump(mode="json"), workspace) as backend:
        start = method.init().alpha
        updates = np.stack(
            [
                await _update(federation, method, backend, visit)
                for visit in range(options["visits"])
            ]
        )
        probe = await Probe.of(
            spec,
            federation.vocabulary,
            method,
            backend=backend,
            dev=federation.dev,
            probing=Probing(**options["probing"]),
        )

        async def loss(alpha: NDArray[np.floating]) -> float:
            found = await probe.measure(State(alpha=method.project(alpha)))
            return found["expected_loss"]

        untrained = await loss(start)
        curvatures: list[float] = []
        for group in np.array_split(updates, options["groups"]):
            step = group.sum(axis=0)
            ends = [method.project(start + sign * step) for sign in (1.0, -1.0)]
            # What the projection leaves of the step.
            length = np.square((ends[0] - ends[1]).astype(np.float64) / 2.0).sum()
            bend = await loss(ends[0]) + await loss(ends[1]) - 2.0 * untrained
            curvatures.append(bend / float(length))
    gradients = -updates / rate
    mean = gradients.mean(axis=0)
    variance = float(np.square(gradients - mean).sum() / (len(gradients) - 1))
    curvature, deviation = mean_sd(curvatures)
    return {
        "seed": spec.seed,
        "learning_rate": rate,
        "num_samples": method.num_samples,
        "loss": untrained,
        "variance": variance,
        "squared_gradient": float(np.square(mean).sum()) - variance / len(gradients),
        "curvature": curvature,
        "curvature_error": (deviation or 0.0) / len(curvatures) ** 0.5,
        "visits": len(gradients),
        "queries": len(gradients) * method.num_samples,
    }


async def _update(
    federation: Federation, method: Algorithm, backend: LLMBackend, visit: int
) -> NDArray[np.float64]:
    """What one client would do to the untrained alpha, shape (n, N)."""
    import numpy as np

    from fedone_sdk.algorithms import stream, stream_seed
    from fedone_sdk.backends import Prediction, prediction_queries, score_all
    from fedone_sdk.data import draw_minibatch

    spec = federation.spec
    client = visit % len(federation.shards)
    shard = federation.shards[client]
    seeds = [stream_seed(spec.seed, f"constants-{part}", visit) for part in ("prompts", "rows")]
    rows = [shard[i] for i in draw_minibatch(len(shard), spec.method.batch_size, seeds[1])]
    state = method.init()
    candidates = method.ask(state, stream(seeds[0]))
    queries = [
        prediction_queries(
            backend, spec.task, federation.vocabulary.text(prompt.tolist()), rows, len(rows)
        )[0]
        for prompt in candidates.prompts
    ]
    answers = await score_all(backend, queries)
    losses = []
    for query, answer in zip(queries, answers, strict=True):
        found = Prediction.of(spec.task, [query], [answer], rows).mean_loss
        if found is None:
            raise BackendError("the model answered none of a prompt's inputs")
        losses.append(found)
    after = method.tell(state, candidates, losses).alpha
    update: NDArray[np.float64] = after.astype(np.float64) - state.alpha.astype(np.float64)
    return update
