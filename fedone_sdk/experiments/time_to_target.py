"""A tuning run that is measured during training and ends at its targets."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

from fedone_sdk.errors import FedOneError
from fedone_sdk.experiments.experiment import Result, Trial, Workspace
from fedone_sdk.experiments.federated import Tuning, run_trial, trial_backend, tuning_federation
from fedone_sdk.experiments.probe import Probe, Probing
from fedone_sdk.experiments.settings import Settings

if TYPE_CHECKING:
    from fedone_sdk.aggregator import ServedRun
    from fedone_sdk.aggregator.rounds.events import Effect
    from fedone_sdk.aggregator.serving.run import RunReloaded
    from fedone_sdk.algorithms import State
    from fedone_sdk.backends import LLMBackend
    from fedone_sdk.messages import RunResult
    from fedone_sdk.simulation import Federation


def target_trial(key: str, settings: Settings, tuning: Tuning, probing: Probing) -> Trial:
    """The trial of a run that ends at its targets, else after its rounds.

    Raises:
        SpecError: There is no data for the task, or no such run.
    """
    trial = run_trial(
        key,
        settings,
        tuning,
        run_to_target,
        held_out=tuning.held_out,
        probing=dataclasses.asdict(probing),
    )
    # Records name the function by its former place.
    return dataclasses.replace(trial, function="fedone_sdk.experiments.passage:run_passage")


def run_to_target(options: dict[str, Any], workspace: Workspace) -> Result:
    """Runs a federation until its targets are reached.

    Args:
        options: As of `run_tuning`, and ``probing``.
        workspace: As of `run_tuning`.

    Returns:
        The ``curve``: per measurement the ``round``s and training ``queries`` done (0 is
        untrained), and what the probe found; ``reached``: per target the training queries at the
        first measurement that reached it, None where none did; what was spent.

    Raises:
        FedOneError: The run failed, so the queries that it would have needed are unknown.
    """
    federation = tuning_federation(options, workspace)
    measured, result = asyncio.run(_run(federation, Probing(**options["probing"]), workspace))
    if result.status not in ("completed", "stopped"):
        raise FedOneError(f"the run ended as {result.status}: {result.reason}")
    return {
        "seed": result.seed,
        "status": result.status,
        "rounds": result.rounds,
        "curve": measured.curve,
        "reached": measured.reached,
        "losses": [entry.mean_loss for entry in result.history],
        "queries_per_round": [entry.queries for entry in result.history],
        "spent": result.spent.model_dump(mode="json"),
        "probe_queries": measured.asked,
        "prompt": result.prompt.text,
        "model": result.model,
        "reused_rows": federation.reused_rows,
        "num_clients": len(federation.shards),
        "vocab_size": len(federation.vocabulary),
        "wall_s": result.wall_s,
    }


class _Point(NamedTuple):
    round: int
    queries: int
    state: State


class TargetProbe:
    """Measurements of a run during training, until it reaches its targets.

    Args:
        probing: What is measured, and until when.

    Attributes:
        curve: One entry per measurement.
        reached: Per target the training queries at the first measurement that reached it.
        enough: Set once all targets are reached: training may stop.
        asked: Queries of the probe.
    """

    def __init__(self, probing: Probing) -> None:
        self.curve: list[dict[str, Any]] = []
        self.reached: dict[str, int | None] = dict.fromkeys(probing.gains)
        self.enough = asyncio.Event()
        self.asked = 0
        self._probing = probing
        self._queries = 0
        self._run: ServedRun | None = None
        self._points: asyncio.Queue[_Point | None] = asyncio.Queue()

    def watch(self, run: ServedRun, effect: Effect | RunReloaded | None) -> None:
        """Record an event of the run."""
        from fedone_sdk.aggregator.rounds.events import RoundFinished, RunEnded

        if effect is None:
            self._run = run
            self._points.put_nowait(_Point(0, 0, run.state.method))
        elif isinstance(effect, RoundFinished):
            self._queries += effect.report.queries
            done = effect.report.round + 1
            if done % self._every(run) == 0 or done == run.spec.rounds:
                # The state of this moment: training continues during the measurement.
                self._points.put_nowait(_Point(done, self._queries, run.state.method))
        elif isinstance(effect, RunEnded):
            self._points.put_nowait(None)

    async def follow(self, federation: Federation, backend: LLMBackend) -> None:
        """Measures until the run or its targets are at their end."""
        probe: Probe | None = None
        while (point := await self._points.get()) is not None and not self.enough.is_set():
            assert self._run is not None  # `watch` sets it before it queues a point
            spec = self._run.spec
            if probe is None:
                probe = await Probe.of(
                    spec,
                    federation.vocabulary,
                    self._run.machine.algorithm,
                    backend=backend,
                    dev=federation.dev,
                    probing=self._probing,
                )
            found = await probe.measure(point.state, domain=spec.method.domain)
            self.curve.append({"round": point.round, "queries": point.queries, **found})
            self.asked = probe.asked
            self._compare()

    def _compare(self) -> None:
        first, last = self.curve[0], self.curve[-1]
        # The loss of one untrained prompt may be low by chance, and its target unreachable.
        untrained = first.get("expected_loss", first["prompt_loss"])
        for name, gain in self._probing.gains.items():
            if self.reached[name] is None and last[name] <= untrained - gain:
                self.reached[name] = last["queries"]
        if self.reached and None not in self.reached.values():
            self.enough.set()

    def _every(self, run: ServedRun) -> int:
        method, clients = run.spec.method, run.spec.participation.clients_per_round
        prompts = getattr(method, "num_samples", 1) * method.local_steps
        return max(1, self._probing.queries // (clients * prompts))


async def _run(
    federation: Federation, probing: Probing, workspace: Workspace
) -> tuple[TargetProbe, RunResult]:
    from fedone_sdk.simulation import simulate

    measured = TargetProbe(probing)
    document = federation.spec.backend.model_dump(mode="json")
    # The dev split is the probe's: the aggregator's own evaluation has nothing to do.
    training = dataclasses.replace(federation, dev=())
    async with trial_backend(document, workspace) as backend, asyncio.TaskGroup() as group:
        group.create_task(measured.follow(federation, backend), name="probe")
        result = await simulate(
            training,
            backend=backend,
            transport="memory",
            watch=measured.watch,
            stop=measured.enough,
        )
    return measured, result
