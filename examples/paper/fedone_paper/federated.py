"""Trials that tune a prompt in a federation, with all clients in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import TypeAdapter

from fedone_paper.glue import glue_task
from fedone_paper.settings import Settings
from fedone_sdk.algorithms import Space, method_from_spec
from fedone_sdk.backends.build import build_backend
from fedone_sdk.evaluation.engine import Result, Trial, TrialFunction, Workspace, write_whole
from fedone_sdk.local import Federation, simulate
from fedone_sdk.spec import BackendSpec, RunSpec, validate_spec

if TYPE_CHECKING:
    from fedone_sdk.backends import LLMBackend
    from fedone_sdk.budget import BudgetGuard
    from fedone_sdk.messages import RunResult

_BACKEND: TypeAdapter[BackendSpec] = TypeAdapter(BackendSpec)

CURVE_EXAMPLES = 256
"""Default number of dev rows on which each point of a curve is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """One tuning run; the defaults are the paper's.

    Attributes:
        task: A task of GLUE.
        method: ``method`` as in RUN.yaml: ``{"name": "gs-bdpl", "learning_rate": 3e-4}``.
        num_clients: K, the number of clients.
        shots: Rows per class and client. If the task has too few rows for disjoint shards, rows are
            drawn with replacement, and the result has a note.
        prompt_len: n, the number of positions.
        vocab_size: N, the number of candidates: PMI n-grams of the clients' texts.
        slots: Slots with candidates, used instead of positions.
        rounds: T, the number of rounds.
        clients_per_round: K*.
        every: Rounds between points of the curve; 0 measures only before and after the run.
        curve_examples: Number of dev rows per point of the curve; all points use the same rows.
        held_out: Measure on every `held_out`-th training row, which no client then has; None
            measures on the dev split.
        backend_kind: The library that runs the model; see `Settings.backend`.
    """

    task: str
    method: dict[str, Any]
    seed: int = 0
    num_clients: int = 100
    shots: int = 16
    prompt_len: int = 20
    vocab_size: int = 200
    slots: Sequence[Mapping[str, Any]] = ()
    rounds: int = 100
    clients_per_round: int = 1
    every: int = 10
    curve_examples: int = CURVE_EXAMPLES
    held_out: int | None = None
    backend_kind: Literal["onnx", "transformers"] | None = None


def run_trial(
    key: str, settings: Settings, tuning: Tuning, run: TrialFunction, **options: Any
) -> Trial:
    """Return a trial whose options are `options` and ``run``, the run of a federation.

    Raises:
        SpecError: There is no data for the task, or the run is not valid.
    """
    document = run_document(
        replace(tuning, task=settings.preset(tuning.task)), settings.backend(tuning.backend_kind)
    )
    validate_spec(RunSpec, {**document, "task": glue_task(document["task"])}, source=key)
    inputs = settings.inputs(tuning.task)
    if tuning.held_out is not None:
        del inputs["dev"]
    options = {"run": document, "seed": tuning.seed, "held_out": tuning.held_out, **options}
    return Trial(key=key, run=run, options=options, inputs=inputs)


def run_tuning(options: dict[str, Any], workspace: Workspace) -> Result:
    """Run a federation to its end.

    Args:
        options: ``run`` as in RUN.yaml, but without paths, and ``held_out``.
        workspace: Has the inputs ``model``, ``train`` and, without ``held_out``, ``dev``.

    Returns:
        ``metric`` (on the whole dev split: ``no_prompt``, ``before``, ``after``), the ``curve`` of
        the deployable prompt against training queries (``round`` -1 is before the first round),
        ``losses``, ``queries_per_round``, the cost, and ``resumed``: whether answers of an earlier
        attempt were used. The times are then too short.
    """
    resumed = _answers(workspace).exists()
    federation = tuning_federation(options, workspace)

    async def work() -> RunResult:
        async with trial_backend(options["run"]["backend"], workspace) as backend:
            return await simulate(federation, backend=backend)

    result = asyncio.run(work())
    parts = ("metric", "evaluation", "cache", "communication", "gateway")
    return {
        **run_facts(federation, result),
        "reason": result.reason,
        "curve": _curve(result),
        **{name: getattr(result, name).model_dump(mode="json") for name in parts},
        "alpha_sha256": result.alpha_sha256,
        "resumed": resumed,
    }


def run_facts(federation: Federation, result: RunResult) -> Result:
    """Return the fields that all trials with a run have in their results."""
    return {
        "seed": result.seed,
        "status": result.status,
        "rounds": result.rounds,
        "losses": [entry.mean_loss for entry in result.history],
        "queries_per_round": [entry.queries for entry in result.history],
        "spent": result.spent.model_dump(mode="json"),
        "prompt": result.prompt.text,
        "model": result.model,
        "reused_rows": federation.reused_rows,
        "num_clients": len(federation.shards),
        "vocab_size": len(federation.vocabulary),
        "wall_s": result.wall_s,
    }


def start_of(curve: Sequence[Mapping[str, Any]], target: str) -> float:
    """Return the value from which the gain of a target counts.

    This is the expected value of untrained prompts, if it was measured. The value of the one
    deployable prompt may be good by chance, and its target then out of reach.
    """
    kind = target.rpartition("_")[2]
    found: float = curve[0].get(f"expected_{kind}", curve[0][f"prompt_{kind}"])
    return found


def note_reached(
    reached: dict[str, int | None], curve: Sequence[Mapping[str, Any]], gains: Mapping[str, float]
) -> bool:
    """Record which targets the last measurement newly reaches; return whether all are reached."""
    for name, gain in gains.items():
        change = curve[-1][name] - start_of(curve, name)
        if reached[name] is None and (change if name.endswith("metric") else -change) >= gain:
            reached[name] = curve[-1]["queries"]
    return bool(reached) and None not in reached.values()


def tuning_federation(options: dict[str, Any], workspace: Workspace) -> Federation:
    """Return the federation of a trial, with its data; arguments as for `run_tuning`."""
    run, held_out = options["run"], options.get("held_out")
    train, dev = workspace.inputs["train"], workspace.inputs.get("dev")
    if held_out is not None:
        train, dev = _split(train, held_out, workspace)
    data = {**run["data"], "train": str(train), "dev": str(dev)}
    run = {**run, "task": glue_task(run["task"]), "data": data}
    return Federation.load(validate_spec(RunSpec, run, source="trial"))


def untrained_prompt(federation: Federation) -> str:
    """Return the deployable prompt before the first round; the seed determines it."""
    spec, vocabulary = federation.spec, federation.vocabulary
    method = method_from_spec(
        spec.method,
        Space.repeated(spec.prompt.length, len(vocabulary), vocabulary.blank),
        start=spec.prompt.warm_start(vocabulary),
        seed=spec.seed,
    )
    return vocabulary.text(method.prompt(method.init()))


def trial_backend(
    document: dict[str, Any], workspace: Workspace, *, guard: BudgetGuard | None = None
) -> LLMBackend:
    """Return the backend of a trial; paths are relative to the input ``model``, if there is one.

    The answers are stored in a file for the next attempt at the trial.
    """
    spec = _BACKEND.validate_python({**document, "cache": str(_answers(workspace))})
    return build_backend(spec, workspace.inputs.get("model", "."), guard=guard)


def run_document(tuning: Tuning, backend: dict[str, Any]) -> dict[str, Any]:
    """Return the run as in RUN.yaml, without paths, because files are inputs of a trial."""
    vocabulary = {"kind": "pmi", "size": tuning.vocab_size}
    positions = {"length": tuning.prompt_len, "vocabulary": vocabulary}
    return {
        "name": "trial",
        "task": tuning.task,
        "data": {"train": "train", "num_clients": tuning.num_clients, "shots": tuning.shots},
        "prompt": {"slots": list(tuning.slots)} if tuning.slots else positions,
        "method": tuning.method,
        "participation": {"clients_per_round": tuning.clients_per_round},
        "budget": None,  # the key is part of the trial's identity
        "rounds": tuning.rounds,
        "evaluation": {"every": tuning.every, "examples": tuning.curve_examples},
        "backend": backend,
        "seed": tuning.seed,
    }


def _answers(workspace: Workspace) -> Path:
    return workspace.file("answers.sqlite").absolute()


def _split(train: Path, every: int, workspace: Workspace) -> tuple[Path, Path]:
    """Write every `every`-th row to one file, and the other rows to another."""
    lines = [line for line in train.read_text(encoding="utf-8").split("\n") if line.strip()]
    parts = {
        "train.jsonl": [line for number, line in enumerate(lines) if number % every],
        "held-out.jsonl": lines[::every],
    }
    for name, part in parts.items():
        # Another attempt at the same trial may be reading the file.
        write_whole(workspace.file(name), "".join(f"{line}\n" for line in part))
    return workspace.file("train.jsonl"), workspace.file("held-out.jsonl")


def _curve(result: RunResult) -> list[dict[str, Any]]:
    spent = accumulate(entry.queries for entry in result.history)
    points = [
        {"round": entry.round, "queries": queries, "metric": entry.metric}
        for entry, queries in zip(result.history, spent, strict=True)
        if entry.metric is not None
    ]
    return [{"round": -1, "queries": 0, "metric": result.metric.before}, *points]
