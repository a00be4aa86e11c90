"""table-queries: LLM queries to a target for several K*, every repeat shown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from statistics import fmean
from typing import Any

from fedone_paper.figures import drawing
from fedone_paper.methods import Method, method_of, missing, wanted
from fedone_paper.paper import about, printed
from fedone_paper.queries_report import Repeats
from fedone_paper.settings import Settings
from fedone_paper.study import Point, Report, Results, Study, declared
from fedone_paper.summary import number
from fedone_paper.time_to_target import Probing, target_trial
from fedone_sdk.errors import ArgumentError
from fedone_sdk.evaluation.engine import Result, Trial
from fedone_sdk.spec import GradientSpec


class TableQueries(Study):
    """Queries to a target that pilots chose, for K* clients per round.

    `Settings.options`: ``methods`` (of `CONTENDERS`, joined by commas; gs-bdpl and bdpl without
    it); ``clients`` (the values of K*, joined by commas); ``learning_rate``, ``gain`` (of the first
    target, nats) and ``cap`` (training queries) in the place of what stands there, for all methods
    and K*.
    """

    def grid(self, settings: Settings) -> dict[str, Sequence[Any]]:
        """With the contenders and the K* that the user wants.

        Raises:
            SpecError: A contender is not known or cannot be run here, or a K* is not positive.
        """
        grid = super().grid(settings)
        if (text := settings.options.get("clients")) is not None:
            values = text.split(",")
            if not all(value.isdecimal() and int(value) for value in values):
                raise ArgumentError(f"--set clients: {text!r} is no list of positive whole numbers")
            grid["clients_per_round"] = tuple(dict.fromkeys(map(int, values)))
        if (names := wanted(settings, _known())) is not None:
            for name in names:
                if why := missing(method_of("table-queries", name), settings):
                    raise ArgumentError(f"--set methods: {name} cannot be run: {why}")
            grid["contender"] = names
        return grid

    def trial(self, settings: Settings, key: str, point: Point) -> Trial:
        """Return the trial of a run to the contender's targets."""
        contender, run = self.contender(settings, point["contender"]), self.run(settings)
        clients, rate = point["clients_per_round"], point["rate"]
        tuning = contender.tuning(
            **{name: run[name] for name in ("task", "num_clients", "prompt_len")},
            method={**contender.method} | ({} if rate is None else {"learning_rate": rate}),
            seed=point["seed"],
            clients_per_round=clients,
            rounds=contender.cap // (clients * _num_samples(contender)),
        )
        probing = replace(self.probing(settings), gains=contender.gains)
        trial = target_trial(key, settings, tuning, probing)
        # figure-theory has the same trials.
        return replace(trial, home="table-queries")

    def rates(self, settings: Settings, point: Point) -> Sequence[float]:
        """Return the learning rates of a contender that has several."""
        return self.contender(settings, point["contender"]).rates

    def loss(self, settings: Settings, point: Point, pilots: Sequence[Result]) -> tuple[float, ...]:
        """Return the mean queries of the pilots, and their mean loss at the end to break ties."""
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
        """Return the table, every repeat, K*=1 against the others, and the curves."""
        found = self.repeats(settings, results).values()
        probing = self.probing(settings)
        above, below = zip(*(repeats.panels() for repeats in found), strict=True)
        parts = [
            f"![Queries to the target, and the curves]({self.name}.svg)\n",
            self._rules(settings, probing),
            *(repeats.markdown() for repeats in found),
        ]
        return Report(
            markdown="\n".join(parts),
            figures={self.name: drawing([*above, *below], columns=len(found), size=(4.5, 3.75))},
        )

    def repeats(self, settings: Settings, results: Results) -> dict[str, Repeats]:
        """Return the repeats by contender, without contenders that have none."""
        grid, found = self.grid(settings), {}
        for name in grid["contender"]:
            contender, rates = self.contender(settings, name), {}
            for clients in grid["clients_per_round"]:
                point = {"contender": name, "clients_per_round": clients}
                if (rate := self.rate(settings, point, results)) is not None:
                    rates[clients] = rate
            if runs := self.runs(settings, results, contender=name):
                found[name] = Repeats(
                    label=contender.title,
                    learning_rates=rates,
                    gains=contender.gains,
                    cap=contender.cap,
                    paper=_paper(contender),
                    runs=runs,
                )
        return found

    def contender(self, settings: Settings, name: str) -> Method:
        """Return a contender with what the user asked for.

        Raises:
            SpecError: An option is wrong.
        """
        run, found, options = self.run(settings), method_of("table-queries", name), settings.options
        changes, rates, gains = dict(run["method"]), found.rates, dict(found.gains)
        tunable = rates or "learning_rate" in found.method
        if tunable and (rate := number(options, "learning_rate", None)) is not None:
            changes["learning_rate"], rates = rate, ()
        first = next(iter(gains))
        gains[first] = number(options, "gain", gains[first])
        method, cap = {**found.method, **changes}, run.get("cap", found.cap)
        found = replace(found, method=method, rates=rates, gains=gains, cap=cap)
        if not (asked := number(options, "cap", 0)):
            return found
        clients = self.grid(settings)["clients_per_round"]
        whole = math.lcm(*(each * _num_samples(found) for each in clients))
        if asked % whole:
            raise ArgumentError(
                f"--set cap: {asked} is no multiple of {whole}, whole rounds of every K*"
            )
        return replace(found, cap=asked)

    def probing(self, settings: Settings) -> Probing:
        """Return the measurements of a run."""
        return Probing(**self.run(settings)["probing"])

    def _rules(self, settings: Settings, probing: Probing) -> str:
        """Return the rules that were fixed before the repeats."""
        run, seeds = self.run(settings), ", ".join(map(str, self.said["pilot_seeds"]))
        method = {**GradientSpec().model_dump(), **run["method"]}
        given = {name: settings.options.get(name) for name in ("learning_rate", "gain", "cap")}
        asked = [f"{name}={value}" for name, value in given.items() if value is not None]
        chosen = self.text("user", asked=", ".join(asked)) if asked else ""
        return self.text(
            "rules",
            **{**run, **asdict(probing)},
            batch_size=method["batch_size"],
            num_samples=method["num_samples"],
            chosen=chosen or self.text("pilots", seeds=seeds),
            rates=", ".join(f"{r:g}" for r in method_of("table-queries", "bdpl-tuned").rates),
            seeds=seeds,
            about=about("table-queries"),
        )


def _known() -> list[str]:
    return list(declared()["variants"]["table-queries"])


def _num_samples(contender: Method) -> int:
    """Prompts of a client's step."""
    return int(contender.method.get("num_samples", GradientSpec().num_samples))


def _paper(contender: Method) -> dict[int, float]:
    """Query by K*."""
    paper = printed("table-queries")
    column = paper["columns"].index("queries")
    rows = paper["rows"].get(contender.paper, {})
    return {clients: cells[column][0] for clients, cells in rows.items()}
