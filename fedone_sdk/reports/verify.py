"""Verification of an artefact: by itself, and against its run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeVar

from fedone_sdk.aggregator.rounds.replay import at_round, compare, machine_of
from fedone_sdk.algorithms import alpha_sha256
from fedone_sdk.errors import FedOneError
from fedone_sdk.messages import PromptReport
from fedone_sdk.reports.artefact import PromptArtefact, ledger_sha256
from fedone_sdk.reports.source import ReportedRun
from fedone_sdk.spec import RunSpec
from fedone_sdk.stores import RunSnapshot
from fedone_sdk.vocabulary import Vocabulary

T = TypeVar("T")

Verdict = Literal["ok", "differs", "not checked"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The result of one check.

    Attributes:
        what: The checked property.
        verdict: The result.
        detail: The difference, or why the property was not checked.
    """

    what: str
    verdict: Verdict
    detail: str = ""


def check_artefact(artefact: PromptArtefact) -> list[Check]:
    """Check an artefact by itself."""
    prompt, labels = artefact.prompt, artefact.task.labels
    return [
        _same("digest of the file", artefact.sha256, artefact.digest),
        _same(
            f"prompt is made of its {'tokens' if prompt.slots is None else 'slots'}",
            prompt.text,
            "".join(prompt.tokens if prompt.slots is None else prompt.slots.values()),
        ),
        _same(
            "label bias fits the labels",
            len(labels) if prompt.bias is None else len(prompt.bias),
            len(labels),
        ),
    ]


def check_against(artefact: PromptArtefact, run: ReportedRun) -> list[Check]:
    """Check an artefact against its run.

    For an archive or a store, the checks cover hashes, the ledger, and alpha by a replay of the
    log. If the run has continued, alpha and prompt are replayed up to the artefact's round. A
    result file has no task, candidates or log.

    Args:
        artefact: The artefact.
        run: The run.
    """
    result = run.result
    checks = [
        _same("run", artefact.run_id, result.run_id),
        _same("seed", artefact.seed, result.seed),
        _same("model", artefact.model, result.model),
        _same("cap", artefact.ledger.cap, result.cap),
        _covers("spent", artefact, run),
    ]
    if run.spec is None or run.vocabulary is None or run.snapshot is None:
        if result.rounds == artefact.rounds:
            checks += _same_end(artefact, run)
        else:
            checks.append(_unchecked("alpha", f"the result is of round {result.rounds}"))
        why = "a result file has none; take the run's archive or store"
        return [*checks, *(_unchecked(w, why) for w in ("task", "vocabulary", "ledger", "replay"))]
    spec, vocabulary, snapshot = run.spec, run.vocabulary, run.snapshot
    checks += [
        _same("task", artefact.task, spec.task),
        _same("method", artefact.method, spec.method.label),
        _same("calibration", artefact.calibration, spec.calibration.kind),
        _same("vocabulary", artefact.vocabulary_sha256, vocabulary.sha256),
        _same(
            "ledger",
            f"{artefact.ledger.lines} lines, {artefact.ledger.sha256}",
            f"{min(artefact.ledger.lines, len(snapshot.log))} lines, "
            f"{ledger_sha256(snapshot.log[: artefact.ledger.lines])}",
        ),
    ]
    if result.rounds == artefact.rounds:
        checks += _same_end(artefact, run)
    else:
        checks += _end_at_round(artefact, spec, vocabulary, snapshot)
    return [*checks, _replayed(snapshot)]


def _same_end(artefact: PromptArtefact, run: ReportedRun) -> Iterator[Check]:
    result = run.result
    yield _same("alpha", artefact.alpha_sha256, result.alpha_sha256)
    yield _same("prompt", artefact.prompt, result.prompt)
    yield _same("evaluation", artefact.evaluation.metric, result.metric)


def _end_at_round(
    artefact: PromptArtefact, spec: RunSpec, vocabulary: Vocabulary, snapshot: RunSnapshot
) -> Iterator[Check]:
    """Check alpha and the prompt at the artefact's round."""
    lines = snapshot.log[: artefact.ledger.lines]
    then = _attempt(lambda: at_round(spec, vocabulary, lines, artefact.rounds))
    if isinstance(then, str):
        yield Check(what="alpha", verdict="differs", detail=then)
        return
    yield _same("alpha", artefact.alpha_sha256, alpha_sha256(then.state.method.alpha))
    indices = machine_of(snapshot).method.prompt(then.state.method).tolist()
    found = PromptReport.of(spec.task, vocabulary, indices, artefact.prompt.bias)
    yield _same("prompt", artefact.prompt, found)
    yield _unchecked("evaluation", f"the run has continued since round {artefact.rounds}")


def _replayed(snapshot: RunSnapshot) -> Check:
    report = _attempt(lambda: compare(snapshot))
    if isinstance(report, str):
        return Check(what="replay", verdict="differs", detail=report)
    if report.difference is not None:
        return Check(what="replay", verdict="differs", detail=str(report.difference))
    return Check(what="replay", verdict="ok", detail=f"{report.rounds} rounds replayed")


def _attempt(compute: Callable[[], T]) -> T | str:
    """Return the replay, or why it failed."""
    try:
        return compute()
    except (FedOneError, ValueError) as exc:
        return str(exc)


def _covers(what: str, artefact: PromptArtefact, run: ReportedRun) -> Check:
    """Check that the run has spent at least the artefact's amount, as an account only grows."""
    # Compared as JSON, because the artefact's money was converted to a float.
    theirs = run.result.spent.model_dump(mode="json")
    ours = artefact.ledger.spent.model_dump(mode="json")
    units = ", ".join(unit for unit, amount in ours.items() if amount > theirs[unit])
    if not units:
        return Check(what=what, verdict="ok")
    return Check(what=what, verdict="differs", detail=f"the run has spent less: {units}")


def _same(what: str, ours: object, theirs: object) -> Check:
    if ours == theirs:
        return Check(what=what, verdict="ok")
    # As a Python literal, because an untrusted text must not control the terminal.
    return Check(what=what, verdict="differs", detail=f"artefact: {ours!r}; found: {theirs!r}")


def _unchecked(what: str, why: str) -> Check:
    return Check(what=what, verdict="not checked", detail=why)
