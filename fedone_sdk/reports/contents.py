"""Contents of a report, independent of its form, and the answers that a prompt changes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from fedone_sdk.budget import Usage
from fedone_sdk.evaluation.intervals import confusion
from fedone_sdk.evaluation.outcomes import Outcomes, Which
from fedone_sdk.evaluation.verdict import no_prompt_biased
from fedone_sdk.messages import COMPARED, Standing
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A confusion matrix."""

    columns: list[str]
    rows: list[tuple[str, list[int]]]
    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """The contribution of a client."""

    name: str
    rounds: int
    share: float
    mean_loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """Contents of a report."""

    run: ReportedRun
    verdict: str
    measured: list[tuple[str, Standing]]
    bias_note: str
    confusion: Table | None
    costs: list[tuple[str, str, str]]
    clients: list[Client]
    others: int
    program: str
    note: str
    began: str


def contents_of(run: ReportedRun) -> Contents:
    """Compute the contents of a run's report."""
    result, spec, verdict = run.result, run.spec, run.result.verdict
    after = run.outcomes.get("after")
    table = None
    if after is not None and after.targets:
        table = _table(confusion(after, len(spec.task.labels)), list(spec.task.labels))
    clients = _clients(run)
    if spec.backend.kind == "own":
        # An export names it, and running the program would import it.
        program, note = "", "The model is an object of the run's own, which a report does not name."
    else:
        program, note = program_of(spec.task, result.prompt, spec.backend, result.model)
    return Contents(
        run=run,
        verdict="" if verdict is None else verdict.text,
        measured=[(COMPARED[one.name], one) for one in result.standings],
        bias_note=_BIAS_NOTES.get("" if verdict is None else verdict.bias_from or "", ""),
        confusion=table,
        costs=_costs(run),
        clients=clients[:MOST_CLIENTS],
        others=len(clients[MOST_CLIENTS:]),
        program=program,
        note=note,
        began=f"{datetime.fromtimestamp(run.created_at, UTC):%Y-%m-%d %H:%M UTC}",
    )


def _table(counts: list[list[int]], labels: list[str]) -> Table:
    columns = [*labels, "none of them"]
    if not any(row[-1] for row in counts):
        columns, counts = columns[:-1], [row[:-1] for row in counts]
    return Table(
        columns=columns,
        rows=list(zip(labels, counts, strict=True)),
        most=max(max(row) for row in counts),
    )


def _costs(run: ReportedRun) -> list[tuple[str, str, str]]:
    result = run.result
    spent, cap, evaluation = result.spent, result.cap, result.evaluation
    tokens = spent.prompt_tokens + spent.completion_tokens
    lines = [
        ("Training queries", f"{spent.queries:,}", _cap(cap.queries)),
        ("Evaluation queries", f"{evaluation.queries:,}", "-"),
        ("Billed requests", f"{spent.requests:,}", _cap(cap.requests)),
        ("of them evaluation", f"{evaluation.requests:,}", "-"),
        ("Prompt tokens", f"{spent.prompt_tokens:,}", _cap(cap.prompt_tokens)),
        ("Completion tokens", f"{spent.completion_tokens:,}", _cap(cap.completion_tokens)),
        ("Tokens together", f"{tokens:,}", _cap(cap.tokens)),
        (
            "US dollars",
            f"{spent.usd:.4f}" if result.priced else "unknown",
            "-" if cap.usd is None else f"{cap.usd:.2f}",
        ),
    ]
    if result.leased != Usage():
        lines.append(
            ("Reserved, not settled", f"{result.leased.queries:,} queries", "counts as spent")
        )
    return [
        *lines,
        ("Cached answers", f"{result.cache.hits:,}", "-"),
        ("Federated traffic, up", f"{result.communication.upload_bytes:,} B", "-"),
        ("Federated traffic, down", f"{result.communication.download_bytes:,} B", "-"),
        ("Gateway traffic, up", f"{result.gateway.upload_bytes:,} B", "-"),
        ("Gateway traffic, down", f"{result.gateway.download_bytes:,} B", "-"),
        ("Time", f"{result.wall_s:,.1f} s", "-"),
    ]


def _cap(cap: int | None) -> str:
    return "-" if cap is None else f"{cap:,}"


def _clients(run: ReportedRun) -> list[Client]:
    losses = defaultdict[str, list[float]](list)
    for entry in run.result.history:
        for name in entry.client_id.split(","):
            losses[name].append(entry.mean_loss)
    seats = sum(map(len, losses.values()))
    found = [
        Client(
            name=name,
            rounds=len(theirs),
            share=len(theirs) / seats,
            mean_loss=sum(theirs) / len(theirs),
        )
        for name, theirs in losses.items()
    ]
    return sorted(found, key=lambda client: (-client.rounds, client.name))


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
