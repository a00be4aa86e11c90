"""table-queries: the queries that runs with several K* need to reach a target, for each seed.

A repeat is a run with one seed. It is censored if it does not reach the target under the cap.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import Any

from scipy.stats import trim_mean

from fedone_paper.federated import start_of
from fedone_paper.methods import Method, method_of, missing, wanted
from fedone_paper.settings import Settings, declared
from fedone_paper.statistics import Comparison, Median, compared, median_interval
from fedone_paper.study import Point, Report, Results, Runs, Study
from fedone_paper.tables import Column, about, mean_curve, mean_sd_text, printed, table
from fedone_paper.time_to_target import Probing, target_trial
from fedone_sdk.errors import ArgumentError
from fedone_sdk.evaluation.engine import Result, Trial
from fedone_sdk.reports import Line, Panel, svg_of
from fedone_sdk.spec import GradientSpec

TRIM = 0.1
"""Share of the repeats that the trimmed mean omits at each end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """Queries to targets for several K*, over repeats.

    Attributes:
        label: Name in reports.
        cap: Training queries after which a repeat is censored.
        runs: Results by K* and seed; ``reached`` has the queries to each target, or None.
        learning_rates: Learning rates by K*; empty for methods without a learning rate.
        gains: The targets. The figure shows the first target.
        paper: The paper's means by K*.
    """

    label: str
    cap: int
    runs: Runs
    learning_rates: Mapping[int, float] = field(default_factory=dict)
    gains: Mapping[str, float] = field(default_factory=dict)
    paper: Mapping[int, float] = field(default_factory=dict)

    @property
    def target(self) -> str:
        """The name of the target in the figure."""
        return next(iter(self.gains))

    @property
    def setting(self) -> str:
        """The learning rates in words."""
        rates = sorted(set(self.learning_rates.values()))
        if len(rates) > 1:
            each = (f"{rate:g} at K*={clients}" for clients, rate in self.learning_rates.items())
            return f"learning rate {', '.join(each)}"
        return f"learning rate {rates[0]:g} at every K*" if rates else "the same sigma at every K*"

    def queries(self, clients: int, target: str) -> dict[int, float]:
        """Return the queries to a target by seed; infinite for a censored repeat."""
        return {
            seed: math.inf if (found := run["reached"][target]) is None else float(found)
            for seed, run in self.runs[clients].items()
        }

    def median(self, clients: int, target: str) -> Median:
        """Return the median over the repeats; a censored repeat counts as infinite."""
        return median_interval(list(self.queries(clients, target).values()))

    def median_text(self, target: str, clients: int, _: object = None) -> str:
        """Return a cell with the median and the number of censored repeats."""
        found = list(self.queries(clients, target).values())
        text, missed = queries_text(median_interval(found).value, self.cap), found.count(math.inf)
        return f"{text} ({missed} of {len(found)} never)" if missed else text

    def verdict(self, target: str) -> str:
        """Return a sentence: whether one client per round needs the fewest queries to a target."""
        others, texts = [clients for clients in self.runs if clients != 1], declared()["verdicts"]
        if 1 not in self.runs or not others:
            return str(texts["none"])
        one, found = self.queries(1, target), {}
        for clients in others:
            other = self.queries(clients, target)
            both = sorted(one.keys() & other.keys())
            first, second = ([held[seed] for seed in both] for held in (one, other))
            found[clients] = compared(first, second, cap=self.cap)
        worse, open_ = (
            ", ".join(f"K*={k}" for k, one in found.items() if _decided(one) == sign)
            for sign in (-1, 0)
        )
        head = ("worse" if open_ else "worse_all") if worse else ("open" if open_ else "fewest")
        details = "; ".join(
            texts["detail"].format(
                clients=clients,
                fewer=one.fewer,
                differ=one.fewer + one.more,
                ties=one.ties,
                p_value=one.p_value,
                ratio=_ratio_text(one),
            )
            for clients, one in found.items()
        )
        return f"{texts[head].format(worse=worse, open=open_)}. In detail: {details}."

    def markdown(self) -> str:
        """Return the tables and their verdicts."""
        return "\n".join([f"## {self.label}\n", *(self._section(target) for target in self.gains)])

    def panels(self) -> tuple[Panel, Panel]:
        """Return a panel of the queries to the target over K*, and a panel of curves.

        The first panel has medians with intervals, and a dot per repeat; dots of censored repeats
        are at the top. The second panel has the mean loss of the repeats over training queries.
        """
        target, top = self.target, self.cap * 1.15
        dots, curves = [], []
        for place, (clients, runs) in enumerate(self.runs.items()):
            values = [min(v, top) for v in self.queries(clients, target).values()]
            middle, low, high = (min(v, top) for v in self.median(clients, target))
            error, color = ([middle - low], [high - middle]), f"C{place}"
            dots.append(Line(x=[place] * len(values), y=values, style=".", color=color))
            dots.append(Line(x=[place + 0.15], y=[middle], error=error, style="s", color=color))
            held = [run["curve"] for run in runs.values()]
            x, y, _ = mean_curve(
                [
                    [(at["queries"], at[target] - start_of(curve, target)) for at in curve]
                    for curve in held
                ]
            )
            curves.append(Line(x=x, y=y, color=color, label=f"K*={clients}"))
        return (
            Panel(
                lines=dots,
                level=self.cap,
                ticks={place: str(clients) for place, clients in enumerate(self.runs)},
                x="clients per round, K*",
                y="queries to the target (above the line: never)",
                title=f"{self.label}, {self.setting}",
            ),
            Panel(lines=curves, level=-self.gains[target], y=f"{target} - untrained, nats"),
        )

    def _section(self, target: str) -> str:
        medians = {clients: self.median(clients, target) for clients in self.runs}

        def queries(clients: int) -> list[float]:
            return [found for _, found in sorted(self.queries(clients, target).items())]

        def prompts(runs: Mapping[int, Result], place: int) -> str:
            """Return the deployable prompt's metric at this index of every curve."""
            return mean_sd_text(run["curve"][place]["prompt_metric"] for run in runs.values())

        columns: dict[str, Column] = {
            "reached": lambda k, runs: f"{sum(map(math.isfinite, queries(k)))} of {len(runs)}",
            "median queries": lambda k, _: queries_text(medians[k].value, self.cap),
            "95 % interval": lambda k, _: interval_text(medians[k], self.cap),
            "trimmed mean": lambda k, _: trimmed_text(queries(k), self.cap),
        }
        # The paper has one target.
        if target == self.target and set(self.runs) <= self.paper.keys():
            columns["paper (outliers left out, RoBERTa-large)"] = lambda k, _: (
                f"{self.paper[k]:,.1f}"
            )
        columns["prompt at the start"] = lambda _, runs: prompts(runs, 0)
        columns["prompt at the end"] = lambda _, runs: prompts(runs, -1)
        columns["every repeat, by seed"] = lambda k, _: ", ".join(
            queries_text(found, self.cap) for found in queries(k)
        )
        held = [run["curve"] for runs in self.runs.values() for run in runs.values()]
        starts = [start_of(curve, target) for curve in held]
        about_it = declared()["targets"][target].format(gain=self.gains[target])
        head = (
            f"### To {about_it}\n\nAll with {self.setting}; repeats end at {self.cap:,} queries. "
            f"The start, over all repeats: {min(starts):.3f} to {max(starts):.3f}.\n"
        )
        return f"{head}\n{table('K*', self.runs, columns)}\n{self.verdict(target)}\n"


class TableQueries(Study):
    """Queries to a target for K* clients per round; pilots chose the learning rates.

    `Settings.options`: ``methods`` (variants in `studies.yaml`, separated by commas; default:
    gs-bdpl and bdpl) and ``clients`` (values of K*, separated by commas).
    """

    def grid(self, settings: Settings) -> dict[str, Sequence[Any]]:
        """Return the grid: the methods (contenders) and values of K* that the user wants.

        Raises:
            SpecError: A contender is not known or cannot be run here, or a K* is not positive.
        """
        grid = super().grid(settings)
        if (text := settings.options.get("clients")) is not None:
            values = text.split(",")
            if not all(value.isdecimal() and int(value) for value in values):
                raise ArgumentError(f"--set clients: {text!r} is not a list of positive integers")
            grid["clients_per_round"] = tuple(dict.fromkeys(map(int, values)))
        names = wanted(settings, declared()["variants"]["table-queries"])
        for name in names or ():
            if why := missing(method_of("table-queries", name), settings):
                raise ArgumentError(f"--set methods: {name} cannot be run: {why}")
        return {**grid, "contender": names or grid["contender"]}

    def trial(self, settings: Settings, key: str, point: Point) -> Trial:
        """Return the trial of a run to the contender's targets."""
        contender, run = self.contender(settings, point["contender"]), self.run(settings)
        clients, rate = point["clients_per_round"], point["rate"]
        per_client = contender.method.get("num_samples", GradientSpec().num_samples)
        tuning = contender.tuning(
            **{name: run[name] for name in ("task", "num_clients", "prompt_len")},
            method={**contender.method} | ({} if rate is None else {"learning_rate": rate}),
            seed=point["seed"],
            clients_per_round=clients,
            rounds=contender.cap // (clients * per_client),
        )
        probing = Probing(**run["probing"], gains=contender.gains)
        # figure-theory uses the same trials.
        return replace(target_trial(key, settings, tuning, probing), home="table-queries")

    def rates(self, settings: Settings, point: Point) -> Sequence[float]:
        """Return a contender's learning rates if there are several."""
        return self.contender(settings, point["contender"]).rates

    def loss(self, settings: Settings, point: Point, pilots: Sequence[Result]) -> tuple[float, ...]:
        """Return the pilots' mean queries; for ties, also their mean final loss."""
        contender = self.contender(settings, point["contender"])
        target = next(iter(contender.gains))
        queries = [run["reached"][target] or contender.cap for run in pilots]
        return fmean(queries), fmean(run["curve"][-1][target] for run in pilots)

    def rate(self, settings: Settings, point: Point, results: Results) -> float | None:
        """Return the learning rate of a point: chosen by pilots, or the contender's own."""
        contender = self.contender(settings, point["contender"])
        if contender.rates:
            return super().rate(settings, point, results)
        return contender.method.get("learning_rate")

    def report(self, settings: Settings, results: Results) -> Report:
        """Return the table with every repeat, comparisons of K*=1 with other K*, and the curves."""
        found, run = self.repeats(settings, results).values(), self.run(settings)
        above, below = zip(*(repeats.panels() for repeats in found), strict=True)
        rules = self.text(
            "rules",
            **{**GradientSpec().model_dump(), **run, **run["method"]},
            **asdict(Probing(**run["probing"])),
            rates=", ".join(f"{r:g}" for r in method_of("table-queries", "bdpl-tuned").rates),
            seeds=", ".join(map(str, self.said["pilot_seeds"])),
            about=about("table-queries"),
        )
        figure = f"![Queries to the target, and the curves]({self.name}.svg)\n"
        return Report(
            markdown="\n".join([figure, rules, *(repeats.markdown() for repeats in found)]),
            figures={self.name: svg_of([*above, *below], columns=len(found), size=(4.5, 3.75))},
        )

    def repeats(self, settings: Settings, results: Results) -> dict[str, Repeats]:
        """Return the repeats by contender; contenders without repeats are omitted."""
        grid, found, paper = self.grid(settings), {}, printed("table-queries")
        column = paper["columns"].index("queries")
        for name in grid["contender"]:
            contender, rates = self.contender(settings, name), {}
            for clients in grid["clients_per_round"]:
                point = {"contender": name, "clients_per_round": clients}
                if (rate := self.rate(settings, point, results)) is not None:
                    rates[clients] = rate
            row = {} if settings.quick else paper["rows"].get(contender.paper, {})
            if runs := self.runs(settings, results, contender=name):
                found[name] = Repeats(
                    label=contender.title,
                    learning_rates=rates,
                    gains=contender.gains,
                    cap=contender.cap,
                    paper={clients: cells[column][0] for clients, cells in row.items()},
                    runs=runs,
                )
        return found

    def contender(self, settings: Settings, name: str) -> Method:
        """Return a contender, smaller with ``--quick``."""
        run, found = self.run(settings), method_of("table-queries", name)
        method, cap = {**found.method, **run["method"]}, run.get("cap", found.cap)
        return replace(found, method=method, cap=cap)


def queries_text(queries: float, cap: int) -> str:
    """Format a number of queries; infinity is shown as more than the cap."""
    return f"{queries:,.0f}" if math.isfinite(queries) else f"> {cap:,}"


def interval_text(median: Median, cap: int) -> str:
    """Format the interval of a median."""
    if not median.low and math.isinf(median.high):
        return "too few repeats"
    if math.isinf(median.low):
        return queries_text(median.low, cap)
    return f"{queries_text(median.low, cap)} to {queries_text(median.high, cap)}"


def trimmed_text(queries: Sequence[float], cap: int) -> str:
    """Format the trimmed mean; if it contains censored repeats, it is a lower bound."""
    mean = trim_mean([min(value, cap) for value in queries], TRIM)
    kept = len(queries) - int(TRIM * len(queries))
    return "at least " * math.isinf(sorted(queries)[kept - 1]) + f"{mean:,.1f}"


def _decided(found: Comparison) -> int:
    """Return the sign test's result: 1 if K*=1 needs fewer queries, -1 if more, else 0."""
    if found.p_value >= 0.05:
        return 0
    return 1 if found.fewer > found.more else -1


def _ratio_text(found: Comparison) -> str:
    if found.ratio is None:
        return "no ratio"
    least, most, low, high = found.ratio
    middle = f"{least:.2f}" if least == most else f"at least {least:.2f}"
    if math.isfinite(most) and least < most:
        middle = f"between {least:.2f} and {most:.2f}"
    upper = f"{high:.2f}" if math.isfinite(high) else "no upper bound"
    return f"median ratio of queries {middle}, 95 % interval {low:.2f} to {upper}"
