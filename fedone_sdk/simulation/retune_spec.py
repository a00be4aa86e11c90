"""The run that tunes an old prompt for another model."""

from __future__ import annotations

import re
from typing import Any

from fedone_sdk.errors import ArgumentError, SpecError
from fedone_sdk.reports.artefact import PromptArtefact
from fedone_sdk.spec import BackendSpec, RunSpec, validate_spec

DEFAULT_QUERIES = 200
"""The default cap on training queries, without a command option or a RUN.yaml."""

_NUM_SAMPLES = 10
"""Default prompts per round, without a RUN.yaml."""

_MOST_CLIENTS = 100
_SHARE = 0.8
"""The old prompt's share of a position's probability."""

_MAX_NAME = 64


def retune_name(artefact: PromptArtefact, backend: str) -> str:
    """Return the name of the run, from the names of the artefact and the backend file."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", f"{artefact.name}-on-{backend}")[:_MAX_NAME]


def retune_spec(
    artefact: PromptArtefact,
    backend: BackendSpec,
    *,
    name: str,
    run: RunSpec | None = None,
    train: str | None = None,
    dev: str | None = None,
    num_examples: int = 0,
    queries: int | None = None,
    seed: int | None = None,
) -> RunSpec:
    """Return the run that starts from an artefact's prompt and uses another model.

    Args:
        artefact: The old prompt.
        backend: The new model.
        name: Of the run.
        run: Supplies data, task, method and vocabulary; None uses the artefact's task and the
            defaults of `fedone retune`.
        train: Training file, without a `run`.
        dev: Dev file, without a `run`.
        num_examples: Rows of the training file.
        queries: Cap on training queries; None uses the run's, or `DEFAULT_QUERIES`.
        seed: None uses the run's, or the artefact's.

    Raises:
        SpecError: The prompt consists of vectors, or the run does not fit it.
    """
    tokens = artefact.prompt.tokens
    if not tokens:
        raise SpecError(f"prompt: {artefact.method} tunes vectors, which fit only one model")
    slots = artefact.prompt.slots is not None
    if not slots and "".join(tokens) != artefact.prompt.text:
        raise SpecError("prompt: its tokens do not make its text")
    if slots and run is None:
        raise ArgumentError(
            "--run: is required for a prompt with slots, whose candidates are in its RUN.yaml"
        )
    if run is None:
        given = _of_artefact(artefact, train, dev, num_examples, queries or DEFAULT_QUERIES)
    else:
        given = _of_run(artefact, run, queries)
    given["name"], given["backend"] = name, backend
    given["prompt"]["start"] = [{token: _SHARE} for token in tokens]
    if not slots:
        given["prompt"]["length"] = max(given["prompt"]["length"], len(tokens))
        if given["prompt"]["length"] > len(tokens):  # The other positions start half blank.
            given["prompt"]["vocabulary"] |= {"blank": True}
    # The old label bias belongs to the old model, so the task starts without one.
    if given["task"]["bias"] is not None:
        given["task"] |= {"bias": None}
        given["calibration"] = "auto"
    if seed is not None:
        given["seed"] = seed
    return validate_spec(RunSpec, given, source="arguments")


def _of_artefact(
    artefact: PromptArtefact, train: str | None, dev: str | None, num_examples: int, queries: int
) -> dict[str, Any]:
    size = artefact.evaluation.batch_size
    return {
        "task": artefact.task.model_dump(),
        "data": {
            "train": train,
            "dev": dev,
            # Each client can fill a mini-batch, if there are enough rows.
            "num_clients": min(max(num_examples // size, 1), _MOST_CLIENTS),
        },
        "prompt": {"length": 1, "vocabulary": {"kind": "pmi", "blank": True}},
        "method": {"name": "thompson", "num_samples": _NUM_SAMPLES, "batch_size": size},
        "participation": {"exchange": "losses"},
        "calibration": artefact.calibration,
        "budget": {"queries": queries},
        "rounds": -(-queries // _NUM_SAMPLES),
        "evaluation": {"every": 0},
        "seed": artefact.seed,
    }


def _of_run(artefact: PromptArtefact, run: RunSpec, queries: int | None) -> dict[str, Any]:
    problems = list(_misfits(artefact, run))
    if problems:
        raise SpecError(problems)
    given = run.model_dump()
    cap = queries or (run.budget and run.budget.queries) or DEFAULT_QUERIES
    given["budget"] = {**(given["budget"] or {}), "queries": cap}
    # The untrained prompt, which evaluation measures, is then the old prompt.
    given["evaluation"]["prompt"] = "mode"
    return given


def _misfits(artefact: PromptArtefact, run: RunSpec) -> list[str]:
    """List what makes a run incomparable with an artefact's measurement."""
    old, new, found = artefact.task, run.task, []
    names = list(artefact.prompt.slots or ())
    if names != list(run.prompt.text_slots) or (
        (artefact.prompt.labels is not None) is not run.prompt.chooses_labels
    ):
        wanted = ", ".join([*names, *(["labels"] if artefact.prompt.labels else [])]) or "none"
        found.append(f"prompt.slots: must be the prompt's slots ({wanted})")
    if run.method.domain != "tokens":
        found.append(f"method.name: {run.method.name} tunes vectors, the prompt is of words")
    if list(old.labels) != list(new.labels):
        wanted = ", ".join(old.labels) or "none"
        found.append(f"task.labels: must be the prompt's labels ({wanted})")
    for key in ("metric", "loss", "label_field"):
        if getattr(old, key) != getattr(new, key):
            was, now = getattr(old, key), getattr(new, key)
            found.append(f"task.{key}: is {now!r}, the prompt was tuned and measured with {was!r}")
    if run.data is None or run.data.dev is None:
        found.append("data.dev: is required to compare prompts")
    return found
