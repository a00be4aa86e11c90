"""Contents of a report, independent of its form, and the answers that a prompt changes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import fmean
from typing import NamedTuple

from fedone_sdk.budget import Usage
from fedone_sdk.evaluation.intervals import confusion
from fedone_sdk.evaluation.outcomes import Outcomes, Which
from fedone_sdk.evaluation.verdict import no_prompt_biased
from fedone_sdk.messages import RunResult
from fedone_sdk.reports.forms import program_of
from fedone_sdk.reports.source import ReportedRun
from fedone_sdk.task import Bias, Example, TaskSpec

MOST_CLIENTS = 30
"""Number of clients with a separate row."""

_BIAS_NOTES: Mapping[str, str] = {
    "training": "The label bias of no prompt was fitted on the training losses that were paid for.",
    "dev": "The label bias of no prompt was cross-fitted: each row's on the other rows of the dev "
    "split, in 5 folds.",
}
"""By `Verdict.bias_from`."""


class Contents(NamedTuple):
    """What a report shows beyond the run's result and description.

    Attributes:
        columns: Predicted labels of the confusion matrix; empty without one.
        confusion: Its rows: a true label, and how often each column was predicted.
        costs: What, spent, and its cap.
        clients: Each client's name, rounds, share of the rounds, and mean loss.
        others: Number of further clients.
        program: A program that uses the prompt; empty if there is none.
        note: What holds for the program, or why there is none.
    """

    columns: list[str]
    confusion: list[tuple[str, list[int]]]
    costs: list[tuple[str, str, str]]
    clients: list[tuple[str, int, float, float]]
    others: int
    bias_note: str
    program: str
    note: str
    began: str


def contents_of(run: ReportedRun) -> Contents:
    """Compute the contents of a run's report."""
    result, spec, verdict = run.result, run.spec, run.result.verdict
    columns, rows = _confusion(run)
    clients = _clients(run)
    if spec.backend.kind == "own":
        # An export names it, and running the program would import it.
        program, note = "", "The model is an object of the run's own, which a report does not name."
    else:
        program, note = program_of(spec.task, result.prompt, spec.backend, result.model)
    return Contents(
        columns=columns,
        confusion=rows,
        costs=_costs(run),
        clients=clients[:MOST_CLIENTS],
        others=len(clients[MOST_CLIENTS:]),
        bias_note=_BIAS_NOTES.get("" if verdict is None else verdict.bias_from or "", ""),
        program=program,
        note=note,
        began=f"{datetime.fromtimestamp(run.created_at, UTC):%Y-%m-%d %H:%M UTC}",
    )


def _confusion(run: ReportedRun) -> tuple[list[str], list[tuple[str, list[int]]]]:
    after, labels = run.outcomes.get("after"), list(run.spec.task.labels)
    if after is None or not after.targets:
        return [], []
    counts, columns = confusion(after, len(labels)), [*labels, "none of them"]
    if not any(row[-1] for row in counts):
        columns, counts = labels, [row[:-1] for row in counts]
    return columns, list(zip(labels, counts, strict=True))


def _other_models(result: RunResult) -> list[tuple[str, str, str]]:
    """Return what the proposer and the judge did, and their part of the cost."""
    lines, done = [], result.proposer
    models = {"proposer": None if done is None else done.spent, "judge": result.judge}
    for name, spent in models.items():
        if spent is not None:
            usd = f"USD {spent.usd:.4f}" if result.priced else "at an unknown price"
            lines.append((name.capitalize(), f"{spent.requests:,} requests, {usd}", "-"))
    if done is not None:
        lines += [
            ("Calls of the proposer that failed", f"{done.failed:,}", "-"),
            ("Candidates of the proposer, added", f"{done.added:,}", "-"),
            ("Candidates of the proposer, dropped", f"{done.dropped:,}", "-"),
        ]
    return lines


def _costs(run: ReportedRun) -> list[tuple[str, str, str]]:
    result = run.result
    spent, caps, evaluation = result.spent, result.cap, result.evaluation
    lines = [
        ("Training queries", spent.queries, caps.queries),
        ("Evaluation queries", evaluation.queries, None),
        ("Billed requests", spent.requests, caps.requests),
        ("of them evaluation", evaluation.requests, None),
        ("Prompt tokens", spent.prompt_tokens, caps.prompt_tokens),
        ("Completion tokens", spent.completion_tokens, caps.completion_tokens),
        ("Tokens together", spent.prompt_tokens + spent.completion_tokens, caps.tokens),
        ("Cached answers", result.cache.hits, None),
        ("Federated traffic, up, B", result.communication.upload_bytes, None),
        ("Federated traffic, down, B", result.communication.download_bytes, None),
        ("Gateway traffic, up, B", result.gateway.upload_bytes, None),
        ("Gateway traffic, down, B", result.gateway.download_bytes, None),
    ]
    usd = f"{spent.usd:.4f}" if result.priced else "unknown"
    texts = [
        *(
            (what, f"{count:,}", "-" if most is None else f"{most:,}")
            for what, count, most in lines
        ),
        *_other_models(result),
        ("US dollars", usd, "-" if caps.usd is None else f"{caps.usd:.2f}"),
        ("Time", f"{result.wall_s:,.1f} s", "-"),
    ]
    if result.leased != Usage():
        reserved = f"{result.leased.queries:,} queries"
        texts.append(("Reserved, not settled", reserved, "counts as spent"))
    return texts


def _clients(run: ReportedRun) -> list[tuple[str, int, float, float]]:
    losses = defaultdict[str, list[float]](list)
    for entry in run.result.history:
        for name in entry.client_id.split(","):
            losses[name].append(entry.mean_loss)
    seats = sum(map(len, losses.values()))
    clients = [
        (name, len(theirs), len(theirs) / seats, fmean(theirs)) for name, theirs in losses.items()
    ]
    return sorted(clients, key=lambda client: (-client[1], client[0]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """An example whose answer the prompt changes."""

    example: Example
    before: int
    after: int
    target: int


def changed_answers(
    task: TaskSpec,
    outcomes: Mapping[Which, Outcomes],
    examples: Sequence[Example],
    plain_bias: Bias | None,
) -> list[Change]:
    """Return the examples whose answer differs from that without a prompt, in their order."""
    bare, tuned = outcomes["no_prompt"], outcomes["after"]
    plain = no_prompt_biased(task, bare, plain_bias)
    before = (bare if plain is None else plain.outcomes).predicted
    rows = zip(examples, before, tuned.predicted, tuned.targets, strict=True)
    return [
        Change(example=example, before=old, after=new, target=target)
        for example, old, new, target in rows
        if old is not None and new is not None and old != new
    ]
