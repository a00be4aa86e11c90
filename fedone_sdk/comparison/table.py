"""The table of a comparison as text."""

from __future__ import annotations

import math

from fedone_sdk.comparison.results import Results, Standing
from fedone_sdk.comparison.statistics import Estimate

_HEADER = (
    "method",
    "trials",
    "{metric}",
    "vs {first} [95 %]",
    "loss",
    "vs {first} [95 %]",
    "to target",
    "queries",
    "example calls",
    "requests",
)


def header_of(results: Results) -> list[str]:
    """Return the columns of the table."""
    first = results.standings[0].entrant.name
    return [name.format(metric=results.task.metric, first=first) for name in _HEADER]


def row_of(results: Results, standing: Standing) -> list[str]:
    """One line of the table."""
    median = standing.queries_to_target
    reached = sum(one is not None for one in standing.reached.values())
    count = len(standing.reached)
    queries = "-" if median is None else f"{median:.0f}" if math.isfinite(median) else "never"
    if 0 < reached < count:
        queries += f" ({reached} of {count})"
    return [
        standing.entrant.name,
        str(len(standing.trials)),
        _number(standing.metric),
        _estimate(standing.difference),
        _number(standing.loss),
        _estimate(standing.loss_difference),
        queries,
        _count(standing.mean("queries")),
        _count(standing.mean("example_calls")),
        f"{standing.spent.requests:,}",
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _estimate(found: Estimate | None) -> str:
    return "-" if found is None else f"{found.mean:+.4f} [{found.low:+.4f}, {found.high:+.4f}]"
