"""The bench of queries in words, tables and curves."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from fedone_sdk.experiments.experiment import Draw
from fedone_sdk.experiments.settings import Settings
from fedone_sdk.experiments.summary import markdown_table
from fedone_sdk.experiments.table_queries import PILOTS
from tests.benchmarks.queries.bootstrap import Difference, Interval, median_bootstrap
from tests.benchmarks.queries.contest import Scale
from tests.benchmarks.queries.contestants import BARS, BILLED_BARS, CONTESTANTS
from tests.benchmarks.queries.results import (
    BARE,
    HELD_TO,
    WORTHWHILE,
    BenchResults,
    Passage,
    Runs,
    VariantResults,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["MARGIN", "draw_curves", "written"]

MARGIN = 0.005
"""By so much a method may be worse than the calibrated bare model and not be inferior, nats."""

_POINTS = 1.0
"""Accuracy that an attack may cost, in points."""

_COLUMNS = (50, 100, 200, 500, 1000, 2000)
"""Marks of the tables, where they were measured; the last mark always is one."""

_SHARES = {500: 0.5, 2000: 0.9}
"""Share of the oracle's gain that is aimed at, by mark."""

_UNITS: Mapping[str, str] = {
    "queries": "logical training queries",
    "requests": "billed requests (a query is one)",
    "tokens": "billed prompt tokens",
}


def written(bench: BenchResults, settings: Settings, scale: Scale) -> str:
    """The report as Markdown."""
    parts = [
        _rules(settings, scale),
        f"![The deployable prompt's loss against {_UNITS['queries']}](queries-queries.svg)\n",
        *_promises(bench),
        *_parallel(bench),
        *_liars(bench),
        *(
            _variant(bench, found)
            for found in bench.variants
            if found.variant.name == found.variant.twin
        ),
        *_skipped(bench),
        f"![Against {_UNITS['requests']}](queries-requests.svg)\n",
        f"![Against {_UNITS['tokens']}](queries-tokens.svg)\n",
    ]
    return "\n".join(parts)


def draw_curves(bench: BenchResults, unit: str) -> Draw:
    """Draws the median loss of each method, with 95 % intervals, one panel per variant.

    Args:
        bench: The results.
        unit: What is counted from left to right: ``queries``, ``requests`` or ``tokens``.
    """

    def draw(figure: Figure) -> None:
        shown = [found for found in bench.variants if found.variant.attack is None]
        columns = min(max(len(shown), 1), 3)
        rows = max(1, -(-len(shown) // columns))
        figure.set_size_inches(4.6 * columns, 3.2 * rows + 1.2)
        panels = figure.subplots(rows, columns, squeeze=False)
        for panel in panels.flat[len(shown) :]:
            panel.set_axis_off()
        names = list(dict.fromkeys(name for found in shown for name in found.runs))
        colours = {name: f"C{number % 10}" for number, name in enumerate(names)}
        for found, panel in zip(shown, panels.flat, strict=False):
            _draw_panel(panel, bench, found, unit, colours)
        figure.supxlabel(_UNITS[unit], fontsize=9)
        figure.supylabel("cross-entropy on dev, nats", fontsize=9)
        lines = dict(
            pair
            for panel in panels.flat
            for pair in zip(*reversed(panel.get_legend_handles_labels()), strict=True)
        )
        figure.legend(
            list(lines.values()),
            list(lines),
            loc="outside upper center",
            ncols=columns + 1,
            fontsize=7,
        )

    return draw


def _draw_panel(
    panel: Axes,
    bench: BenchResults,
    found: VariantResults,
    unit: str,
    colours: Mapping[str, str],
) -> None:
    panel.set_title(found.variant.title, fontsize=8)
    panel.tick_params(labelsize=7)
    panel.set_xscale("log")
    for name, runs in found.runs.items():
        trained = [mark for mark in bench.marks if runs.median(mark, unit).value]
        x = [runs.median(mark, unit).value for mark in trained]
        y = [runs.median(mark, "loss") for mark in trained]
        style = "--" if name.endswith("-plain") else "-"
        panel.plot(
            x, [m.value for m in y], style, color=colours[name], label=runs.label, linewidth=1.2
        )
        panel.fill_between(
            x, [m.low for m in y], [m.high for m in y], color=colours[name], alpha=0.12, lw=0
        )
    for kind, colour in ("plain", "0.6"), ("balanced", "0.3"):
        if found.no_prompt:
            level = _bare(found, kind).value
            panel.axhline(level, color=colour, linestyle=":", linewidth=1, label=BARE[kind])
    if found.oracle is not None:
        panel.axhline(found.oracle["loss"], color="k", linestyle="-.", linewidth=1, label="Oracle")


def _rules(settings: Settings, scale: Scale) -> str:
    """What was fixed beforehand."""
    quick = (
        "**--quick: tiny runs that show that everything works; the numbers mean nothing.** "
        if settings.quick
        else ""
    )
    return (
        f"{quick}{scale.num_clients} clients of {scale.shots} rows per class, "
        f"{scale.vocab_size} candidates, up to {scale.marks[-1]:,} logical training queries (one "
        "prompt on one mini-batch). Measured is the deployable prompt, as it would be handed out "
        "at that moment, with the label bias that the run itself found, if it looks for one: its "
        "mean cross-entropy over the label words and its metric on the whole dev split. Neither "
        "is seen by the run, and no best of several looks is taken. A mark counts as many whole "
        "rounds as fit; a run that ends early keeps its last prompt. All methods of a seed have "
        "the same clients.\n\n"
        "**Billed** is what a provider was asked after equal questions were answered from memory: "
        "requests where a query is one (and its prompt tokens), and where each example is one.\n\n"
        "**Settings.** What is at its best has settings that were chosen on pilots of SST-2 "
        f"(seeds {' and '.join(map(str, PILOTS))}, never reported). Ours run with one setting "
        "everywhere.\n\n"
        "**Targets** are the losses that other methods have at the cap, each by the same seed. "
        "Queries to a target: the first mark at which the loss is as low; *for good*: from which "
        "on it stays so; *of the other itself*: it may have been as good long before its cap.\n\n"
        "**Statistics.** Lower medians over seeds with 95 % percentile bootstrap intervals; "
        "differences are means over pairs of the same seed, with paired bootstrap intervals. Each "
        "interval is of one comparison. The bare model's label bias is fitted on "
        f"{scale.bias_rows} labelled rows of the variant's own clients, once as they are, and once "
        "with all classes counting alike. Where clients' labels are shared out unevenly, the "
        "second is the harder bar: our searches, too, think classes more alike than few clients "
        "show them, and dev's nearly are.\n"
    )


def _promises(bench: BenchResults) -> Iterator[str]:
    """What the default is held to, a line for each variant."""
    name = bench.default
    shown = [
        found
        for found in bench.variants
        if found.variant.name == found.variant.twin and name in found.runs
    ]
    if not shown:
        return
    yield f"## The default: {CONTESTANTS[name].label}\n"
    rows = []
    for found in shown:
        cells = [found.variant.title]
        for bar, times in BARS.items():
            passage = bench.passage(found, name, bar)
            cells.append("-" if passage is None else _ratio(passage.ratios["queries"], times))
            if bar in BILLED_BARS:
                billed = BILLED_BARS[bar]
                cells += [
                    "-" if passage is None else _ratio(passage.ratios[cost], billed)
                    for cost in ("requests", "example_requests")
                ]
        cells += [
            _inferior(found.against_no_prompt(name, bench.marks[-1], kind)) for kind in HELD_TO
        ]
        rows.append(cells)
    header = ["Variant"]
    for bar, times in BARS.items():
        header.append(f"{CONTESTANTS[bar].label}: queries / {times:g}")
        if bar in BILLED_BARS:
            header += [
                f"requests / {BILLED_BARS[bar]:g}",
                f"one per example / {BILLED_BARS[bar]:g}",
            ]
    header += [f"Loss less that of: {BARE[kind]}" for kind in HELD_TO]
    yield markdown_table(header, rows)
    yield (
        "How many times more the other has spent at the cap than the default at the first mark "
        "that is as good: the median over seeds [95 %], 0 where it is never as good; **bold** "
        "where the interval is at or above what stands in the head, *slanted* where only the "
        "median is. Last columns: the mean difference [95 %], nats, and the one-sided 95 % bound; "
        f"**not inferior** where that is at most {MARGIN} nats, **better** where the interval is "
        "below 0.\n"
    )
    yield from _oracles(bench, shown)


def _oracles(bench: BenchResults, shown: list[VariantResults]) -> Iterator[str]:
    rows = []
    for found in shown:
        if found.oracle is None or found.gap is None:
            continue
        shares = []
        for mark, aim in _SHARES.items():
            share = found.closed(bench.default, mark) if mark in bench.marks else None
            shares.append("-" if share is None else _percent(share, aim))
        rows.append(
            [
                found.variant.title,
                f"{_bare(found, 'calibrated').value:.4f}",
                f"{found.oracle['train_loss']:.4f} / {found.oracle['loss']:.4f}",
                f"{found.gap:.4f}",
                *shares,
                f"{found.oracle['tried']:,}{'' if found.oracle['converged'] else ' (cut short)'}",
                f"`{found.oracle['prompt']}`",
            ]
        )
    if not rows:
        return
    yield "### How much there was to gain\n"
    aims = [f"Closed at {mark:,} (aim {aim:.0%})" for mark, aim in _SHARES.items()]
    header = ["Variant", "Bare, calibrated", "Oracle, train / dev", "Gap", *aims, "Prompts tried"]
    yield markdown_table([*header, "Its prompt"], rows)
    yield (
        "The oracle searches on the rows of all clients together, calibrated and without a cap, "
        "once per task, label words and template (clients of seed 0, IID). Shares are of the gap "
        f"between the two on dev, said where it is over {WORTHWHILE} nats.\n"
    )


def _parallel(bench: BenchResults) -> Iterator[str]:
    """Whether one client per round needs the fewest queries, for our methods too."""
    rows = []
    for found in bench.variants:
        twin = bench.twin(found)
        if found.variant.clients_per_round == 1 or twin is None:
            continue
        for name in found.runs:
            if name not in twin.runs:
                continue
            for one in (twin, found):
                row = [found.runs[name].label, str(one.variant.clients_per_round)]
                row += [_loss(one.runs[name], mark) for mark in _columns(bench)]
                passage = bench.passage(one, name, "gs-bdpl-paper")
                row.append("-" if passage is None else _count(passage.queries, bench))
                if row not in rows:
                    rows.append(row)
    if not rows:
        return
    yield "## Clients per round\n"
    header = ["Method", "K*", *(f"Loss at {mark:,}" for mark in _columns(bench))]
    yield markdown_table([*header, "Queries to GS-BDPL's, the paper's settings, K* = 1"], rows)


def _liars(bench: BenchResults) -> Iterator[str]:
    rows = [
        [found.variant.title, runs.label, _difference(cost, digits=2), _held(cost)]
        for found in bench.variants
        for name, runs in found.runs.items()
        if (cost := bench.cost_of_lies(found, name)) is not None
    ]
    if rows:
        yield "## Liars\n"
        yield markdown_table(
            ["Variant", "Method", "Accuracy lost or won, points", f"At most {_POINTS:g} lost"], rows
        )
        yield (
            "Accuracy at the cap with liars minus without, the mean over pairs of the same seed "
            "[95 %]. Liars change losses and curves alike: *inverted* mirrors them at their mean, "
            "*amplified* does so tenfold, *random* draws them anew.\n"
        )


def _variant(bench: BenchResults, found: VariantResults) -> str:
    """All methods on a variant."""
    marks = _columns(bench)
    last = bench.marks[-1]
    rows = []
    for kind, label in BARE.items():
        if found.no_prompt:
            level = f"{_bare(found, kind).value:.3f}"
            metric = median_bootstrap([one[kind]["metric"] for one in found.no_prompt.values()])
            cells = [level] * len(marks)
            seeds = str(len(found.no_prompt))
            rows.append([label, "", seeds, *cells, f"{100 * metric.value:.1f}", "", "", "", "", ""])
    for runs in found.runs.values():
        ends = [runs.median(last, name) for name in ("queries", "requests", "example_requests")]
        rows.append(
            [
                runs.label,
                str(len(runs.by_seed)),
                *(_loss(runs, mark) for mark in marks),
                f"{100 * runs.median(last, 'metric').value:.1f}",
                *(f"{end.value:,.0f}" for end in ends),
                f"{runs.median(last, 'tokens').value / 1e6:.2f}",
                _refit(runs),
            ]
        )
    if found.oracle is not None:
        cells = [f"{found.oracle['loss']:.3f}"] * len(marks)
        share = f"{100 * found.oracle['metric']:.1f}"
        rows.append(["Oracle", "1", *cells, share, "", "", "", "", ""])
    header = [
        "Method",
        "Seeds",
        *(f"Loss at {mark:,}" for mark in marks),
        "Metric at the cap",
        "Queries",
        "Requests",
        "One per example",
        "Million tokens",
        "Loss with a bias fitted afterwards",
    ]
    parts = [f"## {found.variant.title}\n", markdown_table(header, rows), *_targets(bench, found)]
    return "\n".join(parts)


def _targets(bench: BenchResults, found: VariantResults) -> Iterator[str]:
    rows = []
    for bar in BARS:
        for name, runs in found.runs.items():
            passage = bench.passage(found, name, bar)
            if passage is not None:
                rows.append([CONTESTANTS[bar].label, *_passage(runs, passage, bench)])
    if rows:
        header = ["Target", "Method", "Its median", "Queries of the median curve"]
        header += ["Queries, by seed", "For good", "Of the other itself, for good"]
        header += ["Seeds that reach it", "Ratio of queries"]
        yield markdown_table([*header, "Of requests", "Of requests, one per example"], rows)


def _passage(runs: Runs, passage: Passage, bench: BenchResults) -> list[str]:
    return [
        runs.label,
        f"{passage.target:.4f}",
        _queries(passage.median_queries, bench),
        _count(passage.queries, bench),
        _count(passage.queries_for_good, bench),
        _count(passage.bar_queries, bench),
        f"{passage.reached:.0%} of {passage.seeds}",
        *(_ratio(passage.ratios[cost]) for cost in ("queries", "requests", "example_requests")),
    ]


def _skipped(bench: BenchResults) -> Iterator[str]:
    rows = [
        [
            name,
            f"{100 * look['calibrated']['accuracy']:.1f}",
            " to ".join(f"{100 * end:.1f}" for end in look["interval"]),
            f"{100 * look['majority']:.1f}",
        ]
        for name, look in bench.skipped.items()
    ]
    if rows:
        yield "## Tasks that were left out\n"
        yield markdown_table(["Variant", "Accuracy", "95 %", "Majority"], rows)
        yield (
            f"The calibrated bare model (seed {PILOTS[0]}) is not above the dev split's majority "
            "class there, by its exact interval: per cent.\n"
        )


def _columns(bench: BenchResults) -> list[int]:
    found = [mark for mark in bench.marks if mark in _COLUMNS]
    return found if bench.marks[-1] in found else [*found, bench.marks[-1]]


def _bare(found: VariantResults, kind: str) -> Interval:
    return median_bootstrap([one[kind]["loss"] for one in found.no_prompt.values()])


def _loss(runs: Runs, mark: int) -> str:
    found = runs.median(mark, "loss")
    if len(runs.by_seed) == 1:
        return f"{found.value:.3f}"
    return f"{found.value:.3f} [{found.low:.3f}, {found.high:.3f}]"


def _refit(runs: Runs) -> str:
    found = [run["refit"]["loss"] for run in runs.by_seed.values() if run["refit"] is not None]
    return f"{median_bootstrap(found).value:.3f}" if found else ""


def _queries(value: float, bench: BenchResults) -> str:
    return f"{value:,.0f}" if math.isfinite(value) else f"> {bench.marks[-1]:,}"


def _count(found: Interval, bench: BenchResults) -> str:
    value, low, high = [_queries(number, bench) for number in found]
    return value if low == high else f"{value} [{low}, {high}]"


def _ratio(found: Interval, wanted: float | None = None) -> str:
    text = f"{found.value:.1f} [{found.low:.1f}, {found.high:.1f}]"
    if wanted is None or found.value < wanted:
        return text
    return f"**{text}**" if found.low >= wanted else f"*{text}*"


def _percent(found: Interval, aim: float) -> str:
    text = f"{found.value:.0%} [{found.low:.0%}, {found.high:.0%}]"
    return f"**{text}**" if found.value >= aim else text


def _difference(found: Difference, *, digits: int) -> str:
    if found.pairs == 1:
        return f"{found.mean:+.{digits}f}, one seed"
    return f"{found.mean:+.{digits}f} [{found.low:+.{digits}f}, {found.high:+.{digits}f}]"


def _inferior(found: Difference | None) -> str:
    if found is None:
        return "-"
    text = _difference(found, digits=4)
    if found.pairs == 1:
        return text
    verdict = "better" if found.high < 0.0 else "not inferior" if found.most <= MARGIN else ""
    return f"{text}, at most {found.most:+.4f}{f': **{verdict}**' if verdict else ''}"


def _held(cost: Difference) -> str:
    if cost.mean < -_POINTS:
        return "no"
    return "yes" if cost.low >= -_POINTS else "in the mean"
