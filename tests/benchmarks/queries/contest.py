"""One run of the bench of queries: the deployable prompt at each mark, on the whole dev split."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from fedone_sdk.comparison.rows import pooled_rows
from fedone_sdk.errors import FedOneError, SpecError
from fedone_sdk.experiments.experiment import Result, Trial, Workspace
from fedone_sdk.experiments.federated import Tuning, run_document, trial_backend, tuning_federation
from fedone_sdk.experiments.settings import Settings
from fedone_sdk.spec import RunSpec, validate_spec
from tests.benchmarks.queries.attacks import attacked
from tests.benchmarks.queries.contestants import Contestant, can_be_attacked
from tests.benchmarks.queries.label_rows import BATCH_SIZE, LabelRows
from tests.benchmarks.queries.meter import Bill, Meter
from tests.benchmarks.queries.variants import ATTACKER_SHARE, Variant

if TYPE_CHECKING:
    from fedone_sdk.aggregator import ServedRun
    from fedone_sdk.aggregator.rounds.events import Effect
    from fedone_sdk.aggregator.serving.run import RunReloaded
    from fedone_sdk.algorithms import State
    from fedone_sdk.messages import RunResult
    from fedone_sdk.simulation import Federation

__all__ = ["Scale", "contest_document", "contest_trial", "run_contest"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The scale of the bench.

    Attributes:
        marks: Logical training queries at which the deployable prompt is evaluated, ascending; the
            last is every run's cap.
        num_clients: K.
        shots: Rows per class and client.
        vocab_size: N, including a blank.
        bias_rows: Client rows that the label bias of a baseline is fitted on.
        method: Overrides settings of every method.
        prompt_len: Overrides n; None keeps each contestant's.
    """

    marks: tuple[int, ...]
    num_clients: int = 100
    shots: int = 16
    vocab_size: int = 200
    bias_rows: int = 320
    method: tuple[tuple[str, Any], ...] = ()
    prompt_len: int | None = None


def contest_document(
    settings: Settings, scale: Scale, variant: Variant, contestant: Contestant, seed: int
) -> dict[str, Any]:
    """Return the run as in RUN.yaml, without paths.

    Raises:
        SpecError: The run is invalid.
    """
    method = {**contestant.method, **dict(scale.method)}
    cap = min(scale.marks[-1], contestant.queries or scale.marks[-1])
    tuning = Tuning(
        task=variant.task,
        method=method,
        seed=seed,
        num_clients=scale.num_clients,
        shots=scale.shots,
        prompt_len=scale.prompt_len or contestant.prompt_len,
        vocab_size=scale.vocab_size,
        rounds=max(1, cap // (variant.clients_per_round * method["num_samples"])),
        clients_per_round=variant.clients_per_round,
        participation=dict(contestant.participation),
        every=0,
        queries=cap,
    )
    run = run_document(tuning, settings.backend())
    run["task"] = variant.task_document()
    run["data"]["partition"] = variant.partition_document()
    run["prompt"]["vocabulary"]["blank"] = contestant.blank
    run["calibration"] = contestant.calibration
    run["defence"] = contestant.defence
    validate_spec(RunSpec, run, source=f"{variant.name}, {contestant.label}")
    return run


def contest_trial(
    key: str,
    settings: Settings,
    scale: Scale,
    variant: Variant,
    contestant: Contestant,
    seed: int,
) -> Trial:
    """Return the trial of a run.

    Args:
        key: Of the trial.
        settings: The user's settings.
        scale: The scale of the bench.
        variant: The task.
        contestant: The method.
        seed: Of the run.

    Raises:
        SpecError: There is no data for the task, or the run is invalid.
    """
    run = contest_document(settings, scale, variant, contestant, seed)
    if variant.attack is not None and not can_be_attacked(contestant):
        raise SpecError(
            f"--set methods: {key}: attacks need the losses exchange", source="arguments"
        )
    return Trial(
        key=key,
        run=run_contest,
        function="fedone_sdk.experiments.contest:run_contest",
        options={
            "run": run,
            "seed": seed,
            "held_out": None,  # Part of the identity of stored trials.
            "marks": list(scale.marks),
            "lie": variant.attack,
            "liars": 0.0 if variant.attack is None else ATTACKER_SHARE,
            "bias_rows": scale.bias_rows,
        },
        inputs=settings.inputs(variant.task),
    )


def run_contest(options: dict[str, Any], workspace: Workspace) -> Result:
    """Run a federation, and evaluate its deployable prompt at each mark.

    Args:
        options: ``run`` as of `tuning_federation`; ``marks``; ``lie`` (the attack) and
            ``liars`` (its share of clients); ``bias_rows``.
        workspace: Has the inputs ``model``, ``train`` and ``dev``.

    Returns:
        The ``curve``: per mark, with the untrained start as mark 0, the ``round``s and ``queries``
        so far (the most whole rounds within the mark, or the whole run), their cost (`Bill`), and
        of the deployable ``prompt`` with its ``bias`` the ``loss`` (cross-entropy, nats),
        ``metric`` and ``accuracy`` on the whole dev split. For a run without calibration,
        ``refit`` is its last prompt with a bias fitted afterwards on client rows, at one query per
        32 rows.

    Raises:
        FedOneError: The run failed.
    """
    federation = tuning_federation(options, workspace)
    return asyncio.run(_run(federation, options, workspace))


class _Point(NamedTuple):
    """The state of a run at one time."""

    round: int
    queries: int
    bill: Bill
    state: State


class _Milestones:
    """Records the state of a run at each mark.

    Args:
        marks: Training queries, ascending.
        meter: Counts the billed usage.

    Attributes:
        run: The run, after its first event.
    """

    def __init__(self, marks: Sequence[int], meter: Meter) -> None:
        self.run: ServedRun | None = None
        self._meter = meter
        self._ahead = [0, *marks]
        self._passed: list[tuple[int, _Point]] = []
        self._now: _Point | None = None

    def watch(self, run: ServedRun, effect: Effect | RunReloaded | None) -> None:
        """Record an event of the run."""
        from fedone_sdk.aggregator.rounds.events import RoundFinished

        if effect is None:
            self.run = run
            self._now = _Point(0, 0, self._meter.bill, run.state.method)
        elif isinstance(effect, RoundFinished):
            assert self._now is not None  # the run starts before its first round ends
            queries = self._now.queries + effect.report.queries
            while self._ahead and self._ahead[0] < queries:
                self._passed.append((self._ahead.pop(0), self._now))
            self._now = _Point(effect.report.round + 1, queries, self._meter.bill, run.state.method)

    def points(self) -> list[tuple[int, _Point]]:
        """The state at each mark: the last whole round within it."""
        assert self._now is not None
        return [*self._passed, *((mark, self._now) for mark in self._ahead)]


async def _run(
    federation: Federation, options: dict[str, Any], workspace: Workspace
) -> dict[str, Any]:
    from fedone_sdk.simulation import simulate

    spec = federation.spec
    between = None
    if options["lie"] is not None:
        between = attacked(
            options["lie"],
            options["liars"],
            num_clients=len(federation.shards),
            seed=spec.seed,
        )
    document = options["run"]["backend"]
    async with trial_backend(document, workspace, keep=False) as backend:
        meter = Meter(backend)
        milestones = _Milestones(options["marks"], meter)
        result = await simulate(
            # The bench evaluates on the dev split itself; the aggregator does not.
            dataclasses.replace(federation, dev=()),
            backend=meter,
            transport="memory",
            watch=milestones.watch,
            between=between,
        )
        if result.status == "failed":
            raise FedOneError(f"the run ended as {result.status}: {result.reason}")
        assert milestones.run is not None
        method = milestones.run.machine.algorithm
        answers: dict[str, LabelRows] = {}
        curve = []
        for mark, point in milestones.points():
            prompt = federation.vocabulary.text(method.prompt(point.state).tolist())
            if prompt not in answers:
                answers[prompt] = await LabelRows.ask(backend, spec.task, prompt, federation.dev)
            rows, bias = answers[prompt], method.bias(point.state)
            curve.append(
                {
                    "mark": mark,
                    "round": point.round,
                    "queries": point.queries,
                    **point.bill._asdict(),
                    "prompt": prompt,
                    "bias": None if bias is None else bias.tolist(),
                    "loss": rows.loss(bias),
                    "metric": rows.metric(bias),
                    "accuracy": rows.accuracy(bias),
                }
            )
        refit = None
        if spec.calibration.kind == "none":
            held = pooled_rows(federation, options["bias_rows"])
            bias = (await LabelRows.ask(backend, spec.task, prompt, held)).fitted()
            refit = {
                "queries": point.queries + -(-len(held) // BATCH_SIZE),
                "bias": bias.tolist(),
                "loss": rows.loss(bias),
                "metric": rows.metric(bias),
                "accuracy": rows.accuracy(bias),
            }
    return {**_account(result, federation), "curve": curve, "refit": refit}


def _account(result: RunResult, federation: Federation) -> dict[str, Any]:
    return {
        "seed": result.seed,
        "status": result.status,
        "rounds": result.rounds,
        "spent": result.spent.model_dump(mode="json"),
        "communication": result.communication.model_dump(mode="json"),
        "model": result.model,
        "reused_rows": federation.reused_rows,
        "num_clients": len(federation.shards),
        "vocab_size": len(federation.vocabulary),
        "wall_s": result.wall_s,
    }
