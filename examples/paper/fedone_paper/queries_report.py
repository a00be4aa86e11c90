"""Reports of repeats that run to a target: medians, every repeat, and a comparison of K*."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fedone_paper.figures import Line, Panel
from fedone_paper.statistics import (
    Comparison,
    Median,
    TrimmedMean,
    compared,
    median_interval,
    trimmed_mean,
)
from fedone_paper.study import Runs
from fedone_paper.summary import Column, mean_curve, mean_sd_text, table

TRIM = 0.1
"""Share of the repeats that the trimmed mean leaves out at each end."""

_MEANING = {
    "expected_loss": "the expected loss of prompts drawn from alpha",
    "prompt_loss": "the loss of the deployable prompt",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """Queries to targets for several K*, over repeats.

    Attributes:
        label: Their name in reports.
        cap: Training queries at which a repeat is censored.
        runs: Results by K* and seed; ``reached`` has the queries to each target, None for never.
        learning_rates: By K*; empty for methods without a learning rate.
        gains: The targets; the first one is the table's.
        paper: The paper's means by K*.
    """

    label: str
    cap: int
    runs: Runs
    learning_rates: Mapping[int, float] = field(default_factory=dict)
    gains: Mapping[str, float] = field(default_factory=dict)
    paper: Mapping[int, float] = field(default_factory=dict)

    @property
    def present(self) -> list[int]:
        """The K* that have repeats."""
        return list(self.runs)

    def queries(self, clients: int, target: str) -> dict[int, float]:
        """Query to a target by seed; infinite where a repeat did not reach it."""
        return {
            seed: math.inf if (found := run["reached"][target]) is None else float(found)
            for seed, run in self.runs[clients].items()
        }

    def median(self, clients: int, target: str) -> Median:
        """Return the median over the repeats, the censored ones infinite."""
        return median_interval(list(self.queries(clients, target).values()))

    def median_text(self, clients: int, target: str) -> str:
        """Return the median, and how many repeats did not reach the target."""
        found = list(self.queries(clients, target).values())
        text, missed = queries_text(median_interval(found).value, self.cap), found.count(math.inf)
        return f"{text} ({missed} of {len(found)} never)" if missed else text

    def comparison(self, clients: int, target: str) -> Comparison:
        """K*=1 against another K*, over the seeds that both have."""
        one, other = self.queries(1, target), self.queries(clients, target)
        seeds = sorted(one.keys() & other.keys())
        return compared([one[s] for s in seeds], [other[s] for s in seeds], cap=self.cap)

    def verdict(self, target: str) -> str:
        """Whether one client per round needs the fewest queries to a target, in a sentence."""
        others = [clients for clients in self.present if clients != 1]
        if 1 not in self.present or not others:
            return "Nothing can be said of K*=1 against other K*: there are no repeats of both."
        parts, better, worse = [], [], []
        for clients in others:
            found = self.comparison(clients, target)
            if found.share is None:
                parts.append(f"no repeat differs between K*=1 and K*={clients}")
                continue
            share, low, high = found.share
            tied = f"{found.ties} tied or both censored" if found.ties else "no ties"
            parts.append(
                f"K*=1 needed fewer queries than K*={clients} in {found.fewer} of "
                f"{found.fewer + found.more} repeats that differ ({share:.0%}, 95 % interval "
                f"{low:.0%} to {high:.0%}; {tied}; sign test p = {found.p_value:.2g}; "
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
    def setting(self) -> str:
        """The learning rates in words."""
        rates = sorted(set(self.learning_rates.values()))
        if not rates:
            return "the same sigma at every K*"
        if len(rates) == 1:
            return f"learning rate {rates[0]:g} at every K*"
        each = (f"{rate:g} at K*={clients}" for clients, rate in self.learning_rates.items())
        return f"learning rate {', '.join(each)}"

    @property
    def target(self) -> str:
        """The name of the table's target."""
        return next(iter(self.gains))

    def trimmed(self, clients: int, target: str) -> TrimmedMean:
        """Return the mean without the extremes."""
        values = list(self.queries(clients, target).values())
        return trimmed_mean(values, share=TRIM, cap=self.cap)

    def markdown(self) -> str:
        """Return the tables and their verdicts."""
        return "\n".join([f"## {self.label}\n", *(self._section(target) for target in self.gains)])

    def panels(self) -> tuple[Panel, Panel]:
        """Query to the target over K*, and the curves that led there.

        The first one has medians with their intervals and a dot per repeat, censored ones at the
        top edge. The second one has the mean loss of the repeats over their queries.
        """
        target, top = self.target, self.cap * 1.15
        dots, curves = [], []
        for place, clients in enumerate(self.present):
            values = [min(v, top) for v in self.queries(clients, target).values()]
            median = self.median(clients, target)
            low, middle, high = (min(v, top) for v in (median.low, median.value, median.high))
            error, color = ([middle - low], [high - middle]), f"C{place}"
            dots.append(Line(x=[place] * len(values), y=values, style=".", color=color))
            dots.append(Line(x=[place + 0.15], y=[middle], error=error, style="s", color=color))
            x, y, _ = mean_curve(
                [
                    [(at["queries"], at[target] - _start(run["curve"])) for at in run["curve"]]
                    for run in self.runs[clients].values()
                ]
            )
            curves.append(Line(x=x, y=y, color=color, label=f"K*={clients}"))
        known = {n: self.paper[k] for n, k in enumerate(self.present) if k in self.paper}
        if known:
            label = "paper (another model)"
            dots.append(Line(x=list(known), y=list(known.values()), style="kx", label=label))
        return (
            Panel(
                lines=dots,
                level=self.cap,
                ticks={place: str(clients) for place, clients in enumerate(self.present)},
                x="clients per round, K*",
                y="queries to the target (above the line: never)",
                title=f"{self.label}, {self.setting}",
            ),
            Panel(
                lines=curves,
                level=-self.gains[target],
                x="training queries",
                y=f"{target} - untrained, nats",
            ),
        )

    def _section(self, target: str) -> str:
        queries = {clients: self.queries(clients, target) for clients in self.present}
        medians = {clients: self.median(clients, target) for clients in self.present}
        columns: dict[str, Column] = {
            "reached": lambda _, found: (
                f"{sum(map(math.isfinite, found.values()))} of {len(found)}"
            ),
            "median queries": lambda k, _: queries_text(medians[k].value, self.cap),
            "95 % interval": lambda k, _: interval_text(medians[k], self.cap),
            "trimmed mean": lambda k, _: (
                "at least " * (mean := self.trimmed(k, target)).bounded + f"{mean.value:,.1f}"
            ),
        }
        # The paper has one target.
        if target == self.target and set(self.present) <= self.paper.keys():
            columns["paper (outliers left out, RoBERTa-large)"] = lambda k, _: (
                f"{self.paper[k]:,.1f}"
            )
        columns["prompt at the start"] = lambda k, _: mean_sd_text(self._prompts(k, 0))
        columns["prompt at the end"] = lambda k, _: mean_sd_text(self._prompts(k, -1))
        starts = [_start(run["curve"]) for runs in self.runs.values() for run in runs.values()]
        every: dict[str, Column] = {
            "queries": lambda _, found: ", ".join(
                queries_text(found[seed], self.cap) for seed in sorted(found)
            )
        }
        return "\n".join(
            [
                f"### To {self.gains[target]:g} nats below the start: "
                f"{_MEANING.get(target, target)}\n",
                f"All with {self.setting}; repeats end at {self.cap:,} queries. The start, over "
                f"all repeats: {min(starts):.3f} to {max(starts):.3f} nats.\n",
                table("K*", queries, columns),
                self.verdict(target) + "\n",
                "Every repeat, by seed:\n",
                table("K*", queries, every),
            ]
        )

    def _prompts(self, clients: int, place: int) -> list[float]:
        """Return the metric of the deployable prompt at a place of every curve."""
        return [run["curve"][place]["prompt_metric"] for run in self.runs[clients].values()]


def queries_text(queries: float, cap: int) -> str:
    """Format a number of queries; an infinite one is more than the cap."""
    return f"{queries:,.0f}" if math.isfinite(queries) else f"> {cap:,}"


def interval_text(median: Median, cap: int) -> str:
    """Format the interval of a median."""
    if not median.low and math.isinf(median.high):
        return "too few repeats"
    if math.isinf(median.low):
        return queries_text(median.low, cap)
    return f"{queries_text(median.low, cap)} to {queries_text(median.high, cap)}"


def _start(curve: Sequence[Mapping[str, float]]) -> float:
    """Return the untrained expected loss; without one, that of the untrained prompt."""
    return curve[0].get("expected_loss", curve[0]["prompt_loss"])


def _names(clients: Sequence[int]) -> str:
    return ", ".join(f"K*={number}" for number in clients)


def _ratio(found: Comparison) -> str:
    if found.ratio is None:
        return "no ratio"
    least, most, low, high = found.ratio
    middle = f"{least:.2f}" if least == most else f"at least {least:.2f}"
    if math.isfinite(most) and least < most:
        middle = f"between {least:.2f} and {most:.2f}"
    upper = f"{high:.2f}" if math.isfinite(high) else "no upper bound"
    return f"median ratio of queries {middle}, 95 % interval {low:.2f} to {upper}"
