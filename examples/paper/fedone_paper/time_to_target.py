"""A run that is measured during training, and ends when it reaches its targets.

A measurement has the expected loss of prompts drawn from alpha, and the deployable prompt's loss.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedone_paper.federated import (
    Tuning,
    note_reached,
    run_facts,
    run_trial,
    trial_backend,
    tuning_federation,
)
from fedone_paper.settings import Settings
from fedone_paper.soft_trials import SOFT, run_soft_to_target, soft_trial
from fedone_sdk.algorithms import stream, stream_seed
from fedone_sdk.backends import Prediction, prediction_queries, score_all
from fedone_sdk.data import draw_minibatch
from fedone_sdk.errors import BackendError, FedOneError
from fedone_sdk.evaluation.engine import Result, Trial, Workspace
from fedone_sdk.local import Federation, simulate

if TYPE_CHECKING:
    from fedone_sdk.aggregator import Change, ServedRun
    from fedone_sdk.algorithms import State
    from fedone_sdk.backends import LLMBackend
    from fedone_sdk.task import Example


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Probing:
    """Settings of the measurements. Their queries do not count as training queries.

    Attributes:
        queries: Training queries between two measurements; rounded down to whole rounds, at least
            one round.
        prompts: Number of prompts drawn from alpha.
        rows: Number of dev rows for each of these prompts; each prompt has its own draw.
        prompt_rows: Number of dev rows for the deployable prompt.
        gains: The targets, by name: how far the loss must be below the untrained expected loss
            (nats), or the metric above the untrained expected metric. For a soft prompt, the start
            is the untrained prompt. The run ends when all targets are reached.
    """

    queries: int = 100
    prompts: int = 64
    rows: int = 16
    prompt_rows: int = 128
    gains: Mapping[str, float] = dataclasses.field(default_factory=dict)


def target_trial(key: str, settings: Settings, tuning: Tuning, probing: Probing) -> Trial:
    """Return the trial of a run that ends at its targets, or else after its rounds."""
    options = dataclasses.asdict(probing)
    if tuning.method["name"] in SOFT:
        return soft_trial(key, settings, tuning, run_soft_to_target, probing=options)
    return run_trial(key, settings, tuning, run_to_target, probing=options)


def run_to_target(options: dict[str, Any], workspace: Workspace) -> Result:
    """Run a federation until its targets are reached.

    Args:
        options: The options of `run_tuning`, and ``probing``.
        workspace: As for `run_tuning`.

    Returns:
        ``curve``: per measurement, the number of rounds (``round``, 0 is untrained) and training
        ``queries`` so far, and mean losses (nats) and metrics: ``expected_...`` over prompts drawn
        from alpha, and ``prompt_...`` of the deployable prompt;
        ``reached``: per target, the training queries at the first measurement that reached it, or
        None; and `run_facts`.

    Raises:
        FedOneError: The run failed, so the number of queries to the target is unknown.
    """
    return asyncio.run(_run_to_target(options, workspace))


async def _run_to_target(options: dict[str, Any], workspace: Workspace) -> Result:
    federation = tuning_federation(options, workspace)
    probe = _Probe(federation, Probing(**options["probing"]))
    # Only the probe measures on the dev split; the aggregator has no rows for evaluation.
    training = dataclasses.replace(federation, dev=())
    async with (
        trial_backend(options["run"]["backend"], workspace) as backend,
        asyncio.TaskGroup() as group,
    ):
        group.create_task(probe.follow(backend), name="probe")
        result = await simulate(training, backend=backend, watch=probe.watch, stop=probe.enough)
    if result.status not in ("completed", "stopped"):
        raise FedOneError(f"the run ended as {result.status}: {result.reason}")
    return {
        **run_facts(federation, result),
        "curve": probe.curve,
        "reached": probe.reached,
        "probe_queries": probe.asked,
    }


class _Probe:
    """Measures a run during training; all measurements use the same dev rows and noise.

    Attributes:
        curve: One entry per measurement.
        reached: Per target, the training queries at the first measurement that reached it.
        enough: Set when all targets are reached, so that training can stop.
        asked: Number of queries of the probe, including cached answers.
    """

    def __init__(self, federation: Federation, probing: Probing) -> None:
        self.curve: list[dict[str, Any]] = []
        self.reached: dict[str, int | None] = dict.fromkeys(probing.gains)
        self.enough = asyncio.Event()
        self.asked = 0
        self._federation, self._probing = federation, probing
        self._queries = 0
        self._run: ServedRun | None = None
        self._points: asyncio.Queue[tuple[int, int, State] | None] = asyncio.Queue()
        self._rows = [
            self._drawn("probe-rows", number, probing.rows) for number in range(probing.prompts)
        ]
        self._prompt_rows = self._drawn("probe-prompt-rows", 0, probing.prompt_rows)

    def watch(self, run: ServedRun, change: Change | None) -> None:
        """Record an event of the run."""
        if change is None:
            self._run = run
            self._points.put_nowait((0, 0, run.state.method))
            return
        if change.finished is not None:
            self._queries += change.finished.report.queries
            done = change.finished.report.round + 1
            if done % self._every(run) == 0 or done == run.spec.rounds:
                # The current state, because training continues during the measurement.
                self._points.put_nowait((done, self._queries, run.state.method))
        if change.ended:
            self._points.put_nowait(None)

    async def follow(self, backend: LLMBackend) -> None:
        """Measure until the run ends or its targets are reached."""
        while (point := await self._points.get()) is not None and not self.enough.is_set():
            assert self._run is not None  # set by `watch`
            done, queries, state = point
            found: dict[str, Any] = {"round": done, "queries": queries}
            method, probing = self._run.machine.method, self._probing
            noise = noises(method.shape, count=probing.prompts, seed=self._run.spec.seed)
            prompts = sampled(state.alpha, noise)
            found |= await self._measured("expected", backend, prompts, self._rows)
            prompt = method.prompt(state)
            found |= await self._measured("prompt", backend, [prompt], [self._prompt_rows])
            self.curve.append(found)
            if note_reached(self.reached, self.curve, probing.gains):
                self.enough.set()

    def _drawn(self, purpose: str, number: int, count: int) -> list[Example]:
        dev, seed = self._federation.dev, self._federation.spec.seed
        drawn = draw_minibatch(len(dev), count, stream_seed(seed, purpose, 0, number))
        return [dev[index] for index in drawn]

    async def _measured(
        self,
        name: str,
        backend: LLMBackend,
        prompts: Iterable[NDArray[np.int64]],
        rows: Sequence[list[Example]],
    ) -> dict[str, float]:
        """Return the mean loss (nats) and metric of prompts, each measured on its own rows."""
        assert self._run is not None
        task, shown = self._run.spec.task, self._run.text_prompt
        queries = [
            query
            for prompt, held in zip(prompts, rows, strict=True)
            for query in prediction_queries(backend, task, shown(prompt.tolist()), held, len(held))
        ]
        answers = await score_all(backend, queries)
        self.asked += len(queries)
        found = await Prediction.of(task, queries, answers, [row for held in rows for row in held])
        if found.mean_loss is None or found.metric is None:
            raise BackendError("the model answered none of the probe's inputs")
        return {f"{name}_loss": found.mean_loss, f"{name}_metric": found.metric}

    def _every(self, run: ServedRun) -> int:
        method, clients = run.spec.method, run.spec.participation.clients_per_round
        prompts = method.num_samples * method.local_steps
        return max(1, self._probing.queries // (clients * prompts))


def noises(shape: tuple[int, int], *, count: int, seed: int) -> NDArray[np.float32]:
    """Return Gumbel noise for `count` prompts, shape (count, n, N); `shape` is (n, N)."""
    generator = stream(stream_seed(seed, "probe", 0))
    return generator.gumbel(size=(count, *shape)).astype(np.float32)


def sampled(alpha: NDArray[np.float32], noise: NDArray[np.float32]) -> NDArray[np.int64]:
    """Draw prompts from the rows of alpha with the Gumbel-max trick, shape (count, n).

    With the same noise, a prompt changes only if probabilities in alpha change enough. Differences
    of measurements are therefore due to alpha, and most answers are already in the cache.

    Args:
        alpha: Shape (n, N), positive.
        noise: Shape (count, n, N).
    """
    drawn: NDArray[np.int64] = (np.log(alpha) + noise).argmax(axis=2).astype(np.int64)
    return drawn
