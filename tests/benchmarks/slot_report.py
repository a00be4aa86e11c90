"""The report of the slot bench, in Markdown."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tests.benchmarks.bootstrap import paired_difference
from tests.benchmarks.slot_runs import CONTESTANTS, Table

Trial = Mapping[str, Any]

LEAST_GAP = 0.02
"""Least gap between no prompt and the oracle, nats; shares of a smaller gap are meaningless."""

LEAST_SEEDS = 5
"""For an interval."""

_PARTITIONS = (
    ("iid", "IID"),
    ("dirichlet", "Dirichlet 0.1"),
    ("liars", "IID, 2 of 8 reverse their losses"),
)


def report(
    tables: Sequence[Table],
    trials: Sequence[Trial],
    *,
    budgets: Sequence[int],
    methods: Sequence[str],
    default: str,
) -> Iterator[str]:
    """Lines of Markdown.

    Args:
        tables: The cells.
        trials: Results of `slot_runs.trial`, with their keys.
        budgets: Queries.
        methods: In the order of the rows.
        default: The method that the others are compared with.
    """
    found = {_key(one): one for one in trials}
    yield from _baselines(tables)
    wide = [table for table in tables if _gap(table) >= LEAST_GAP]
    yield from _over_cells(
        "Share of the gap that is closed, mean over cells",
        wide,
        found,
        budgets,
        methods,
        _share,
        digits=0,
        note="Percent of the gap from the empty prompt with its best bias to the oracle: "
        "the mean over cells and seeds, with a 95 % bootstrap interval over seeds.",
    )
    yield from _by_cell(wide, found, budgets, methods)
    yield from _over_cells(
        "Share of the gap with every deployed prompt at its best bias, mean over cells",
        wide,
        found,
        budgets,
        methods,
        lambda table, one: _share(table, {**one, "loss": one["best_loss"]}),
        digits=0,
    )
    yield from _over_cells(
        "Points of accuracy over the empty prompt with its best bias, mean over all cells",
        tables,
        found,
        budgets,
        methods,
        _more_right,
        digits=1,
    )
    yield from _against_none(tables, found, budgets, default)
    yield from _against_others(tables, found, budgets, methods, default)


def _key(one: Trial) -> tuple[str, str, str, int, int]:
    return one["cell"], one["partition"], one["method"], one["queries"], one["seed"]


def _baselines(tables: Sequence[Table]) -> Iterator[str]:
    yield "### Cells"
    yield ""
    yield (
        "| cell | combinations x rows | empty prompt, no bias | empty prompt, best bias | "
        "best instruction | oracle | median combination | worst combination |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for table in tables:
        plain = table.measured(table.none, np.zeros(table.num_labels))
        every = [table.best(one).loss for one in range(len(table.prompts))]
        cells = [
            f"{one.loss:.3f} / {100 * one.accuracy:.1f} %"
            for one in (
                plain,
                table.best(table.none),
                table.best(table.instruction),
                table.best(table.oracle),
            )
        ]
        size = f"{len(table.prompts)} x {len(table.targets)}"
        ends = [f"{np.median(every):.3f}", f"{max(every):.3f}"]
        yield f"| {' | '.join([table.name, size, *cells, *ends])} |"
    yield ""


def _of(
    found: Mapping[tuple[str, str, str, int, int], Trial],
    table: Table,
    partition: str,
    method: str,
    queries: int,
) -> dict[int, Trial]:
    """Return trials by seed."""
    return {
        key[4]: one
        for key, one in found.items()
        if key[:4] == (table.name, partition, method, queries)
    }


def _loss(one: Trial) -> float:
    """Return the deployed prompt's loss; a policy without its own bias gets the best one."""
    calibrates = CONTESTANTS[one["method"]].calibrates
    return float(one["loss"] if calibrates else one["best_loss"])


def _gap(table: Table) -> float:
    return table.best(table.none).loss - table.best(table.oracle).loss


def _share(table: Table, one: Trial) -> float:
    return 100 * (table.best(table.none).loss - _loss(one)) / _gap(table)


def _more_right(table: Table, one: Trial) -> float:
    """Return the accuracy gain over no prompt with its best bias, points; biases as in `_loss`."""
    right = float(one["accuracy"])
    if not CONTESTANTS[one["method"]].calibrates:
        right = table.best(int(table.rows_of(np.array([one["prompt"]]))[0])).accuracy
    return 100 * (right - table.best(table.none).accuracy)


def _interval(values: Sequence[float], *, digits: int, sign: str = "") -> str:
    if len(values) < LEAST_SEEDS:
        return "too few"
    one = paired_difference(values, [0.0] * len(values))
    form = f"{sign}.{digits}f"
    return f"{one.mean:{form}} [{one.low:{form}}, {one.high:{form}}]"


def _by_cell(
    tables: Sequence[Table],
    found: Mapping[tuple[str, str, str, int, int], Trial],
    budgets: Sequence[int],
    methods: Sequence[str],
) -> Iterator[str]:
    yield "### The same by cell"
    yield ""
    for partition, title in _PARTITIONS:
        for table in tables:
            rows = []
            for method in methods:
                runs = [_of(found, table, partition, method, queries) for queries in budgets]
                shares = [[_share(table, one) for one in of.values()] for of in runs]
                if any(shares):
                    cells = [_interval(one, digits=0) if one else "not run" for one in shares]
                    rows.append(f"| {CONTESTANTS[method].label} | {' | '.join(cells)} |")
            if rows:
                yield f"**{table.name}, {title}**"
                yield ""
                yield "| method | " + " | ".join(f"{one} queries" for one in budgets) + " |"
                yield "|---" * (len(budgets) + 1) + "|"
                yield from (*rows, "")


def _over_cells(
    title: str,
    tables: Sequence[Table],
    found: Mapping[tuple[str, str, str, int, int], Trial],
    budgets: Sequence[int],
    methods: Sequence[str],
    value: Callable[[Table, Trial], float],
    *,
    digits: int,
    note: str | None = None,
) -> Iterator[str]:
    """Yield a table of one value: its mean over cells, by method, clients and queries."""
    yield f"### {title}"
    yield ""
    if note is not None:
        yield from (note, "")
    yield "| method | clients | " + " | ".join(f"{one} queries" for one in budgets) + " |"
    yield "|---" * (len(budgets) + 2) + "|"
    for partition, name in _PARTITIONS:
        for method in methods:
            cells = []
            for queries in budgets:
                by_cell = [
                    [value(table, one) for one in of.values()]
                    for table in tables
                    if (of := _of(found, table, partition, method, queries))
                ]
                whole = len(by_cell) == len(tables)
                cells.append(_mean_over_cells(by_cell, digits=digits) if whole else "not run")
            if any(cell != "not run" for cell in cells):
                yield f"| {CONTESTANTS[method].label} | {name} | {' | '.join(cells)} |"
    yield ""


def _mean_over_cells(cells: Sequence[Sequence[float]], digits: int = 0) -> str:
    """Format the mean over cells; seeds are equal in all cells, so per-seed means are drawn."""
    count = min(map(len, cells))
    by_seed = np.array([one[:count] for one in cells]).mean(axis=0)
    return _interval(by_seed.tolist(), digits=digits)


def _against_none(
    tables: Sequence[Table],
    found: Mapping[tuple[str, str, str, int, int], Trial],
    budgets: Sequence[int],
    default: str,
) -> Iterator[str]:
    yield f"### Cross-entropy of {CONTESTANTS[default].label} minus that of the empty prompt, nats"
    yield ""
    yield (
        'The empty prompt has the bias that the run found for it ("run\'s bias"), or the bias that '
        'is best on all rows ("best bias"), which no run can know.'
    )
    yield ""
    yield (
        "| cell | clients | queries | run's bias, mean | run's bias, worst run | "
        "best bias, mean | best bias, worst run | gain in accuracy, points |"
    )
    yield "|---" * 8 + "|"
    for partition, title in _PARTITIONS:
        for table in tables:
            none = table.best(table.none)
            for queries in budgets:
                of = _of(found, table, partition, default, queries)
                if not of:
                    continue
                fair = [_loss(one) - one["plain_loss"] for one in of.values()]
                less = [_loss(one) - none.loss for one in of.values()]
                points = [_more_right(table, one) for one in of.values()]
                yield (
                    f"| {table.name} | {title} | {queries} "
                    f"| {_interval(fair, digits=3, sign='+')} | {max(fair):+.3f} "
                    f"| {_interval(less, digits=3, sign='+')} | {max(less):+.3f} "
                    f"| {_interval(points, digits=1, sign='+')} |"
                )
    yield ""


def _against_others(
    tables: Sequence[Table],
    found: Mapping[tuple[str, str, str, int, int], Trial],
    budgets: Sequence[int],
    methods: Sequence[str],
    default: str,
) -> Iterator[str]:
    yield f"### {CONTESTANTS[default].label} minus the others, nats, paired by seed"
    yield ""
    yield "| other | clients | " + " | ".join(f"{one} queries" for one in budgets) + " |"
    yield "|---" * (len(budgets) + 2) + "|"
    for partition, title in _PARTITIONS:
        for method in methods:
            if method == default:
                continue
            cells = []
            for queries in budgets:
                pairs: dict[int, list[float]] = defaultdict(list)
                for table in tables:
                    ours = _of(found, table, partition, default, queries)
                    theirs = _of(found, table, partition, method, queries)
                    for seed in ours.keys() & theirs.keys():
                        pairs[seed].append(_loss(ours[seed]) - _loss(theirs[seed]))
                whole = [np.mean(one) for one in pairs.values() if len(one) == len(tables)]
                cells.append(
                    _interval([float(one) for one in whole], digits=4, sign="+")
                    if whole
                    else "not run"
                )
            if any(cell != "not run" for cell in cells):
                yield f"| {CONTESTANTS[method].label} | {title} | {' | '.join(cells)} |"
    yield ""
