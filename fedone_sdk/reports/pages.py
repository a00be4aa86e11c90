"""Reports as HTML files: of a run, and of a comparison of methods."""

from __future__ import annotations

import base64
import shlex
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

import fedone_sdk
from fedone_sdk.budget import Usage
from fedone_sdk.evaluation.intervals import confusion
from fedone_sdk.evaluation.results import Results
from fedone_sdk.messages import COMPARED, RunResult
from fedone_sdk.metrics import metric_text
from fedone_sdk.reports.figures import Line, Panel, curves_svg, svg_of
from fedone_sdk.reports.forms import program_of, templates
from fedone_sdk.reports.source import ReportedRun

if TYPE_CHECKING:
    from fedone_sdk.local.retune import RetuneReport


def _page(template: str, figures: Sequence[str] = (), **values: object) -> str:
    """Return one page without external resources or scripts; all values are escaped."""
    images = [
        f"data:image/svg+xml;base64,{base64.b64encode(figure.encode()).decode()}"
        for figure in figures
    ]
    environment = templates(autoescape=True)
    environment.filters |= {
        "number": metric_text,
        "signed": "{:+.3f}".format,
        "capitalize_first": lambda text: text[:1].upper() + text[1:],
        "shell": shlex.quote,
    }
    values |= {"figures": images, "version": fedone_sdk.__version__}
    return environment.get_template(template).render(values)


def html_report(
    run: ReportedRun,
    retune: RetuneReport | None = None,
    artefact: Path | None = None,
    backend: Path | None = None,
) -> str:
    """Return the report of a run as one HTML page.

    After `fedone retune`, `artefact` and `backend` are the files of the recommended prompt and of
    the new model.
    """
    spec, verdict = run.spec, run.result.verdict
    if spec.backend.kind == "own":
        # An export from another source could make the program import a malicious object.
        program, note = "", "There is no program, because the model is a custom object."
    else:
        program, note = program_of(spec.task, run.result.prompt, spec.backend, run.result.model)
    return _page(
        "report.html.j2",
        curves_svg(run) if run.result.history else (),
        run=run,
        began=f"{datetime.fromtimestamp(run.created_at, UTC):%Y-%m-%d %H:%M UTC}",
        bias_note=_BIAS_NOTES.get("" if verdict is None else verdict.bias_from or "", ""),
        confusion=confusion_of(run),
        costs=costs_of(run),
        clients=clients_of(run),
        max_clients=MAX_CLIENTS,
        program=program,
        note=note,
        retune=retune,
        artefact=artefact and str(artefact),
        backend=backend and str(backend),
        names=COMPARED,
    )


MAX_CLIENTS = 30
"""Maximum number of clients in the report's table."""

_BIAS_NOTES: Mapping[str, str] = {
    "training": 'The label bias of "no prompt" was fitted on the training losses of the run.',
    "dev": 'The label bias of "no prompt" was cross-fitted in 5 folds of the dev split: the bias '
    "for a row was fitted on the other folds.",
}
"""Notes on the label bias of "no prompt", by `Verdict.bias_from`."""


def confusion_of(run: ReportedRun) -> tuple[list[str], list[tuple[str, list[int]]]]:
    """Return columns (predicted labels) and rows (true label, counts); empty without labels."""
    after, labels = run.outcomes.get("after"), list(run.spec.task.labels)
    if after is None or not after.targets:
        return [], []
    counts, columns = confusion(after, len(labels)), [*labels, "none of them"]
    if not any(row[-1] for row in counts):
        columns, counts = labels, [row[:-1] for row in counts]
    return columns, list(zip(labels, counts, strict=True))


def _other_models(result: RunResult) -> list[tuple[str, str, str]]:
    """Return the rows of the cost table for the proposer and the judge."""
    lines, proposer = [], result.proposer
    models = {"proposer": None if proposer is None else proposer.spent, "judge": result.judge}
    for name, spent in models.items():
        if spent is not None:
            usd = f"USD {spent.usd:.4f}" if result.priced else "at an unknown price"
            lines.append((name.capitalize(), f"{spent.requests:,} requests, {usd}", "-"))
    if proposer is not None:
        lines += [
            ("Calls of the proposer that failed", f"{proposer.failed:,}", "-"),
            ("Candidates of the proposer, added", f"{proposer.added:,}", "-"),
            ("Candidates of the proposer, dropped", f"{proposer.dropped:,}", "-"),
        ]
    return lines


def costs_of(run: ReportedRun) -> list[tuple[str, str, str]]:
    """Return the rows of the cost table: name, amount spent, cap."""
    result = run.result
    spent, caps, evaluation = result.spent, result.cap, result.evaluation
    lines = [
        ("Training queries", spent.queries, caps.queries),
        ("Evaluation queries", evaluation.queries, None),
        ("Billed requests", spent.requests, caps.requests),
        ("Billed requests for evaluation", evaluation.requests, None),
        ("Prompt tokens", spent.prompt_tokens, caps.prompt_tokens),
        ("Completion tokens", spent.completion_tokens, caps.completion_tokens),
        ("All tokens", spent.prompt_tokens + spent.completion_tokens, caps.tokens),
        ("Cached answers", result.cache.hits, None),
        ("Federated traffic, upload, bytes", result.communication.upload_bytes, None),
        ("Federated traffic, download, bytes", result.communication.download_bytes, None),
        ("Gateway traffic, upload, bytes", result.gateway.upload_bytes, None),
        ("Gateway traffic, download, bytes", result.gateway.download_bytes, None),
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
        texts.append(("Reserved for open work, counts as spent", reserved, "-"))
    return texts


def clients_of(run: ReportedRun) -> list[tuple[str, int, float, float]]:
    """Return each client's name, rounds, share of all updates and mean loss, sorted by rounds."""
    losses_of = defaultdict[str, list[float]](list)
    for entry in run.result.history:
        for name in entry.client_id.split(","):
            losses_of[name].append(entry.mean_loss)
    total = sum(map(len, losses_of.values()))
    clients = [
        (name, len(losses), len(losses) / total, fmean(losses))
        for name, losses in losses_of.items()
    ]
    return sorted(clients, key=lambda client: (-client[1], client[0]))


_COLOURS = ("#2563a8", "#c2571a", "#1b7f5c", "#8a3ffc", "#b0245b", "#6b7280", "#8a6d00", "#0f7c90")
_MARKERS = "osD^vPX*"


def comparison_html(results: Results, command: str | None = None) -> str:
    """Return the report of a comparison as one HTML page."""
    header, *rows = results.table
    return _page(
        "comparison.html.j2",
        [comparison_svg(results)] if any(one.trials for one in results.standings) else (),
        results=results,
        header=header,
        rows=rows,
        command=command,
    )


def comparison_svg(results: Results) -> str:
    """Plot the mean over seeds, and each seed as a thin line; equal results give equal bytes."""
    panel = Panel(lines=[*_lines(results)], title=f"{results.task.metric} on dev")
    return svg_of([panel], size=(6.4, 4.0), shared_legend=True)


def _lines(results: Results) -> Iterator[Line]:
    trials = [trial for one in results.standings for trial in one.trials.values()]
    last = max((point.queries for trial in trials for point in trial.curve), default=1)
    for place, standing in enumerate(results.standings):
        colour, label = _COLOURS[place % len(_COLOURS)], standing.entrant.label
        if (metric := standing.mean("metric")) is None:
            continue
        if standing.entrant.kind == "baseline":
            yield Line(x=[0, last], y=[metric] * 2, style=":", color=colour, label=label)
            continue
        curves = [
            ([point.queries for point in trial.curve], [point.metric for point in trial.curve])
            for trial in standing.trials.values()
        ]
        for x, y in curves:
            yield Line(x=x, y=y, color=colour, faint=True)
        # Each seed's curve is interpolated linearly, in the range that all curves cover.
        end = min(x[-1] for x, _ in curves)
        grid = sorted({at for x, _ in curves for at in x if at <= end})
        means = np.mean([np.interp(grid, x, y) for x, y in curves], axis=0).tolist()
        style = f"{_MARKERS[place % len(_MARKERS)]}-"
        yield Line(x=grid, y=means, style=style, color=colour, label=label)
