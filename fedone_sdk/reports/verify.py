"""What can be checked of an artefact: by itself, and against the run that it comes from."""

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

__all__ = ["Check", "Verdict", "check_against", "check_artefact"]

T = TypeVar("T")

Verdict = Literal["ok", "differs", "not checked"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that was looked at.

    Attributes:
        what: Which.
        verdict: What came out.
        detail: What differs, or why nothing was checked.
    """

    what: str
    verdict: Verdict
    detail: str = ""


def check_artefact(artefact: PromptArtefact) -> list[Check]:
    """What an artefact says about itself."""
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
    """An artefact against its run.

    Against an archive or a store all of it: hashes, ledger, and alpha computed again from the log.
    The run may have gone on since: then alpha and the prompt are those of the artefact's round,
    computed again. A result file knows no task, no candidates and no log.

    Args:
        artefact: The artefact.
        run: What it is held against.
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
            checks += _ends_alike(artefact, run)
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
        checks += _ends_alike(artefact, run)
    else:
        checks += _ends_then(artefact, spec, vocabulary, snapshot)
    return [*checks, _replayed(snapshot)]


def _ends_alike(artefact: PromptArtefact, run: ReportedRun) -> Iterator[Check]:
    result = run.result
    yield _same("alpha", artefact.alpha_sha256, result.alpha_sha256)
    yield _same("prompt", artefact.prompt, result.prompt)
    yield _same("evaluation", artefact.evaluation.metric, result.metric)


def _ends_then(
    artefact: PromptArtefact, spec: RunSpec, vocabulary: Vocabulary, snapshot: RunSnapshot
) -> Iterator[Check]:
    """Alpha and the prompt when the run had done as many rounds as the artefact says."""
    lines = snapshot.log[: artefact.ledger.lines]
    then = _told(lambda: at_round(spec, vocabulary, lines, artefact.rounds))
    if isinstance(then, str):
        yield Check(what="alpha", verdict="differs", detail=then)
        return
    yield _same("alpha", artefact.alpha_sha256, alpha_sha256(then.state.method.alpha))
    indices = machine_of(snapshot).method.prompt(then.state.method).tolist()
    found = PromptReport.of(spec.task, vocabulary, indices, artefact.prompt.bias)
    yield _same("prompt", artefact.prompt, found)
    yield _unchecked("evaluation", f"the run has gone on since round {artefact.rounds}")


def _replayed(snapshot: RunSnapshot) -> Check:
    report = _told(lambda: compare(snapshot))
    if isinstance(report, str):
        return Check(what="replay", verdict="differs", detail=report)
    if report.difference is not None:
        return Check(what="replay", verdict="differs", detail=str(report.difference))
    return Check(what="replay", verdict="ok", detail=f"{report.rounds} rounds computed again")


def _told(compute: Callable[[], T]) -> T | str:
    """What was computed, or why it could not be."""
    try:
        return compute()
    except (FedOneError, ValueError) as exc:
        return str(exc)


def _covers(what: str, artefact: PromptArtefact, run: ReportedRun) -> Check:
    """Whether the run has spent at least what the artefact says: an account only ever grows."""
    # As JSON has both: the money of an artefact went through a float.
    theirs = run.result.spent.model_dump(mode="json")
    ours = artefact.ledger.spent.model_dump(mode="json")
    units = ", ".join(unit for unit, amount in ours.items() if amount > theirs[unit])
    if not units:
        return Check(what=what, verdict="ok")
    return Check(what=what, verdict="differs", detail=f"the run has spent less: {units}")


def _same(what: str, ours: object, theirs: object) -> Check:
    if ours == theirs:
        return Check(what=what, verdict="ok")
    # As Python writes it: a stranger's text must not steer the terminal.
    return Check(what=what, verdict="differs", detail=f"artefact: {ours!r}; found: {theirs!r}")


def _unchecked(what: str, why: str) -> Check:
    return Check(what=what, verdict="not checked", detail=why)
