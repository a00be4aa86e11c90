"""What repeats of runs to a target show: medians, every repeat, and which K* needs the fewest."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from fedone_sdk.experiments.experiment import Result
from fedone_sdk.experiments.statistics import (
    Comparison,
    Median,
    Ratio,
    TrimmedMean,
    compared,
    median_interval,
    trimmed_mean,
)
from fedone_sdk.experiments.summary import markdown_table, mean_sd_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Repeats", "TRIM", "draw_repeats", "interval_text", "queries_text"]

TRIM = 0.1
"""Share of the repeats that the trimmed mean leaves out at each end."""

_MEANING = {
    "expected_loss": "the expected loss of prompts drawn from alpha",
    "prompt_loss": "the loss of the deployable prompt",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """All repeats of one method.

    Attributes:
        label: The method's name in reports.
        learning_rates: By K*; none for methods without a learning rate.
        gains: The targets; the first one is the table's own.
        cap: Training queries at which a repeat is censored.
        paper: The paper's trimmed means by K*.
        runs: Results by K* and seed.
    """

    label: str
    learning_rates: Mapping[int, float]
    gains: Mapping[str, float]
    cap: int
    paper: Mapping[int, float]
    runs: Mapping[int, Mapping[int, Result]]

    @property
    def setting(self) -> str:
        """The learning rate in words."""
        rates = sorted(set(self.learning_rates.values()))
        if not rates:
            return "the same sigma at every K*"
        if len(rates) == 1:
            return f"learning rate {rates[0]:g} at every K*"
        each = (f"{rate:g} at K*={clients}" for clients, rate in self.learning_rates.items())
        return f"learning rate {', '.join(each)}"

    @property
    def target(self) -> str:
        """The name of the table's own target."""
        return next(iter(self.gains))

    def queries(self, clients: int, target: str) -> dict[int, float]:
        """Queries to a target by seed; infinite where a repeat never reached it."""
        return {
            seed: math.inf if (found := run["reached"][target]) is None else float(found)
            for seed, run in self.runs[clients].items()
        }

    def median(self, clients: int, target: str) -> Median:
        """The median over the repeats, the censored ones infinite."""
        return median_interval(list(self.queries(clients, target).values()))

    def trimmed(self, clients: int, target: str) -> TrimmedMean:
        """The mean without the extremes."""
        values = list(self.queries(clients, target).values())
        return trimmed_mean(values, share=TRIM, cap=self.cap)

    def comparison(self, clients: int, target: str) -> Comparison:
        """K*=1 against another K*, over the seeds that both have."""
        one, other = self.queries(1, target), self.queries(clients, target)
        seeds = sorted(one.keys() & other.keys())
        return compared(
            [one[seed] for seed in seeds], [other[seed] for seed in seeds], cap=self.cap
        )

    def markdown(self) -> str:
        """The tables and what they say."""
        return "\n".join([f"## {self.label}\n", *(self._section(target) for target in self.gains)])

    def data(self) -> dict[str, Any]:
        """The same numbers, as JSON holds them: null is never (infinite)."""
        return {
            "learning_rates": {str(k): rate for k, rate in self.learning_rates.items()},
            "cap": self.cap,
            "targets": {
                target: {"gain": gain, "clients": self._data(target)}
                for target, gain in self.gains.items()
            },
        }

    def verdict(self, target: str) -> str:
        """Whether one client per round needs the fewest queries to a target, in a sentence."""
        others = [clients for clients in self.present if clients != 1]
        if 1 not in self.present or not others:
            return "Nothing can be said of K*=1 against other K*: there are no repeats of both."
        parts, better, worse = [], [], []
        for clients in others:
            found = self.comparison(clients, target)
            if found.share is None:
                parts.append(f"no repeat tells K*=1 from K*={clients}")
                continue
            share, low, high = found.share
            parts.append(
                f"K*=1 needed fewer queries than K*={clients} in {found.fewer} of "
                f"{found.fewer + found.more} repeats that differ ({share:.0%}, 95 % interval "
                f"{low:.0%} to {high:.0%}; {_tied(found.ties)}; sign test p = {found.p_value:.2g}; "
                f"{_ratio(found)})"
            )
            # A tie of medians, or an interval that holds one half, decides nothing.
            better += [clients] if low > 0.5 else []
            worse += [clients] if high < 0.5 else []
        open_ = [clients for clients in others if clients not in {*better, *worse}]
        if len(better) == len(others):
            head = "K*=1 needed the fewest queries, and against each other K* the interval says so"
        elif worse:
            head = f"K*=1 did **not** need the fewest queries: {_names(worse)} needed fewer"
            head += f"; against {_names(open_)} nothing is shown" if open_ else ""
        else:
            head = "That K*=1 needs the fewest queries is **not shown**: "
            head += f"nothing tells it apart from {_names(open_)}"
        return f"{head}. In detail: {'; '.join(parts)}."

    @property
    def present(self) -> list[int]:
        """The K* that have repeats."""
        return [clients for clients, runs in self.runs.items() if runs]

    def _section(self, target: str) -> str:
        rows, repeats = [], []
        # The paper has one target.
        shows_paper = target == self.target and set(self.present) <= self.paper.keys()
        for clients in self.present:
            values = self.queries(clients, target)
            median, trimmed = self.median(clients, target), self.trimmed(clients, target)
            reached = sum(math.isfinite(value) for value in values.values())
            rows.append(
                [
                    str(clients),
                    f"{reached} of {len(values)}",
                    queries_text(median.value, self.cap),
                    interval_text(median, self.cap),
                    ("at least " if trimmed.bounded else "") + f"{trimmed.value:,.1f}",
                    *([f"{self.paper[clients]:,.1f}"] if shows_paper else []),
                    *(mean_sd_text(self._prompts(clients, place)) for place in (0, -1)),
                ]
            )
            repeats.append(
                [
                    str(clients),
                    ", ".join(queries_text(values[seed], self.cap) for seed in sorted(values)),
                ]
            )
        meaning = _MEANING.get(target, target)
        untrained = [run["curve"][0] for runs in self.runs.values() for run in runs.values()]
        levels = [point.get("expected_loss", point["prompt_loss"]) for point in untrained]
        return "\n".join(
            [
                f"### To {self.gains[target]:g} nats below the start: {meaning}\n",
                f"All with {self.setting}; repeats end at {self.cap:,} queries. The start, over "
                f"all repeats: {min(levels):.3f} to {max(levels):.3f} nats.\n",
                markdown_table(
                    [
                        "K*",
                        "reached",
                        "median queries",
                        "95 % interval",
                        "trimmed mean",
                        *(["paper (outliers left out, RoBERTa-large)"] if shows_paper else []),
                        "prompt at the start",
                        "prompt at the end",
                    ],
                    rows,
                ),
                self.verdict(target) + "\n",
                "Every repeat, by seed:\n",
                markdown_table(["K*", "queries"], repeats),
            ]
        )

    def _prompts(self, clients: int, place: int) -> list[float]:
        """The metric of the deployable prompt at a place of every curve."""
        return [run["curve"][place]["prompt_metric"] for run in self.runs[clients].values()]

    def _data(self, target: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for clients in self.present:
            median, trimmed = self.median(clients, target), self.trimmed(clients, target)
            values = self.queries(clients, target)
            found[str(clients)] = {
                "queries": {str(seed): _finite(value) for seed, value in values.items()},
                "median": {name: _finite(value) for name, value in asdict(median).items()},
                "trimmed_mean": asdict(trimmed),
                "paper": self.paper.get(clients),
                "prompt": {"start": self._prompts(clients, 0), "end": self._prompts(clients, -1)},
            }
            if clients != 1 and 1 in self.present:
                against = asdict(self.comparison(clients, target))
                if (ratio := against["ratio"]) is not None:
                    against["ratio"] = {
                        name: _finite(value)
                        for name, value in zip(Ratio._fields, ratio, strict=True)
                    }
                found[str(clients)]["against_one"] = against
        return found


def queries_text(queries: float, cap: int) -> str:
    """Format a number of queries; an infinite one is past the cap."""
    return f"{queries:,.0f}" if math.isfinite(queries) else f"> {cap:,}"


def interval_text(median: Median, cap: int) -> str:
    """Format the interval of a median."""
    if median.coverage == 1.0:
        return "too few repeats"
    if math.isinf(median.low):
        return queries_text(median.low, cap)
    return f"{queries_text(median.low, cap)} to {queries_text(median.high, cap)}"


def draw_repeats(above: Axes, below: Axes, repeats: Repeats) -> None:
    """Draws a method: queries to its target over K*, and the curves that led there.

    Args:
        above: Medians with their intervals, every repeat as a dot; censored ones at the top edge.
        below: The measured loss over queries, the mean of the repeats that still run.
        repeats: The repeats.
    """
    target, present = repeats.target, repeats.present
    top = repeats.cap * 1.15
    for place, clients in enumerate(present):
        values = [min(v, top) for v in repeats.queries(clients, target).values()]
        above.scatter([place] * len(values), values, s=14, alpha=0.4, color=f"C{place}")
        median = repeats.median(clients, target)
        low, middle, high = (min(v, top) for v in (median.low, median.value, median.high))
        above.errorbar(
            place + 0.15, middle, [[middle - low], [high - middle]], fmt="s", color=f"C{place}"
        )
        x, y = _mean_curve(list(repeats.runs[clients].values()), target)
        below.plot(x, y, color=f"C{place}", label=f"K*={clients}")
    if repeats.paper:
        places = [place for place, clients in enumerate(present) if clients in repeats.paper]
        above.plot(
            places,
            [repeats.paper[present[place]] for place in places],
            "kx",
            label="paper (another model)",
        )
        above.legend()
    above.axhline(repeats.cap, color="grey", linestyle=":", linewidth=1)
    above.set_xticks(range(len(present)), [str(clients) for clients in present])
    above.set(
        xlabel="clients per round, K*",
        ylabel="queries to the target (above the line: never)",
        title=f"{repeats.label}, {repeats.setting}",
    )
    below.axhline(-repeats.gains[target], color="grey", linestyle=":", linewidth=1)
    below.set(xlabel="training queries", ylabel=f"{target} - untrained, nats")
    below.legend()


def _mean_curve(runs: Sequence[Result], name: str) -> tuple[list[float], list[float]]:
    """The mean change of a measure, up to where the first repeat ends.

    Farther on only the slow repeats would be left in it.
    """
    curves = []
    for run in runs:
        first = run["curve"][0]
        start = first.get("expected_loss", first["prompt_loss"])
        curves.append([(point["queries"], point[name] - start) for point in run["curve"]])
    shortest = min(curves, key=lambda curve: curve[-1][0])
    grid = [queries for queries, _ in shortest]
    means = [math.fsum(_at(curve, q) for curve in curves) / len(curves) for q in grid]
    return grid, means


def _at(curve: Sequence[tuple[float, float]], queries: float) -> float:
    """A curve's value by linear interpolation."""
    for (x0, y0), (x1, y1) in pairwise(curve):
        if x0 <= queries <= x1:
            return y0 + (y1 - y0) * (queries - x0) / (x1 - x0)
    return curve[-1][1]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _names(clients: Sequence[int]) -> str:
    return ", ".join(f"K*={number}" for number in clients)


def _tied(ties: int) -> str:
    return f"{ties} tied or both censored" if ties else "no ties"


def _ratio(found: Comparison) -> str:
    if found.ratio is None:
        return "no ratio"
    least, most, low, high = found.ratio
    middle = f"{least:.2f}" if least == most else f"at least {least:.2f}"
    if math.isfinite(most) and least < most:
        middle = f"between {least:.2f} and {most:.2f}"
    upper = f"{high:.2f}" if math.isfinite(high) else "no upper bound"
    return f"median ratio of queries {middle}, 95 % interval {low:.2f} to {upper}"
