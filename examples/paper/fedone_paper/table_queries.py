"""table-queries: LLM queries to a target for several K*, every repeat shown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from statistics import fmean
from typing import Any

from fedone_paper.experiment import Report, Results
from fedone_paper.figures import drawing
from fedone_paper.methods import METHODS, Method, missing, wanted
from fedone_paper.paper import about, printed
from fedone_paper.queries_report import Repeats
from fedone_paper.settings import Settings
from fedone_paper.study import Design, Point, Study
from fedone_paper.summary import number
from fedone_paper.time_to_target import Probing, target_trial
from fedone_sdk.errors import ArgumentError
from fedone_sdk.evaluation.engine import Result, Trial
from fedone_sdk.spec import GradientSpec

PILOTS = (9001, 9002)
"""Seeds of the runs that learning rates, targets and caps were chosen on; never reported."""

OWN_RATES = (1e-2, 3e-2, 1e-1, 3e-1)
"""The learning rates that pilots choose from for each K*."""

_GS_BDPL, _BDPL = METHODS["gs-bdpl"], METHODS["bdpl"]
_GS_GAINS, _BDPL_GAINS, _BBT_GAINS = (
    {"expected_loss": 0.01},
    {"expected_loss": 0.03},
    {"prompt_loss": 0.02},
)

CONTENDERS: Mapping[str, Method] = {
    "gs-bdpl": _GS_BDPL.variant(
        "GS-BDPL (tau = 1)", changes={"tau": 1.0, "learning_rate": 1e-2}, gains=_GS_GAINS
    ),
    "bdpl": _BDPL.variant("BDPL", changes={"learning_rate": 1e-2}, gains=_BDPL_GAINS, paper="bdpl"),
    "gs-bdpl-tau0.1": _GS_BDPL.variant(
        "GS-BDPL (tau = 0.1)", changes={"tau": 0.1, "learning_rate": 1e-2}, gains=_GS_GAINS
    ),
    # K*=1 reaches 0.01 nats at its first measurement, so that target compares nothing.
    "gs-bdpl-tuned": _GS_BDPL.variant(
        "GS-BDPL (tau = 1), a rate for each K*",
        changes={"tau": 1.0},
        rates=OWN_RATES,
        gains={"expected_loss": 0.03},
    ),
    "bdpl-tuned": _BDPL.variant(
        "BDPL, a rate for each K*", changes={}, rates=OWN_RATES, gains=_BDPL_GAINS
    ),
    # The two have targets by analogy only: no pilot was run. They need torch, and days on a CPU.
    "bbt": METHODS["bbt-200"].variant(
        "BBT, population 200", changes={}, gains=_BBT_GAINS, cap=24_000, paper="bbt"
    ),
    "bbt-20": METHODS["bbt"].variant(
        "BBT, population 20", changes={"num_samples": 20}, gains=_BBT_GAINS
    ),
}
"""Methods with their targets and caps, by their names in the keys of trials."""


class TableQueries(Study):
    """Queries to a target that pilots chose, for K* clients per round.

    `Settings.options`: ``methods`` (of `CONTENDERS`, joined by commas; gs-bdpl and bdpl without
    it); ``clients`` (the values of K*, joined by commas); ``learning_rate``, ``gain`` (of the first
    target, nats) and ``cap`` (training queries) in the place of what stands there, for all methods
    and K*.
    """

    name = "table-queries"
    title = "LLM queries to a target, for K* clients per round"
    default_seeds = 20
    options = ("cap", "clients", "gain", "learning_rate", "methods")
    design = Design(
        base={"task": "sst2", "num_clients": 100, "prompt_len": 20, "method": {}, "probing": {}},
        small={
            "num_clients": 10,
            "prompt_len": 5,
            "method": {"num_samples": 4, "batch_size": 8},
            "probing": {"queries": 8, "prompts": 8, "prompt_rows": 32},
            "cap": 24,
        },
        axes={"contender": ("gs-bdpl", "bdpl"), "clients_per_round": (1, 3, 10, 30)},
        small_axes={"clients_per_round": (1, 3)},
        key="{contender}_k{clients_per_round}_s{seed}",
        pilot_key="{contender}_k{clients_per_round}_rate{rate:g}_s{seed}",
        pilot_seeds=PILOTS,
    )

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
        if (names := wanted(settings, CONTENDERS)) is not None:
            for name in names:
                if why := missing(CONTENDERS[name], settings):
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
        return replace(trial, home=TableQueries.name)

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
            _rules(settings, self.run(settings), probing),
            *(repeats.markdown() for repeats in found),
        ]
        return Report(
            markdown="\n".join(parts),
            data={
                "pilot_seeds": list(PILOTS),
                "probing": asdict(probing),
                "methods": {repeats.label: repeats.data() for repeats in found},
            },
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
        run, found, options = self.run(settings), CONTENDERS[name], settings.options
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


def _num_samples(contender: Method) -> int:
    """Prompts of a client's step."""
    return int(contender.method.get("num_samples", GradientSpec().num_samples))


def _paper(contender: Method) -> dict[int, float]:
    """Query by K*."""
    paper = printed(TableQueries.name)
    column = paper["columns"].index("queries")
    rows = paper["rows"].get(contender.paper, {})
    return {clients: cells[column][0] for clients, cells in rows.items()}


def _rules(settings: Settings, run: Mapping[str, Any], probing: Probing) -> str:
    """Return the rules that were fixed before the repeats."""
    method = {**GradientSpec().model_dump(), **run["method"]}
    seeds = ", ".join(map(str, PILOTS))
    given = {name: settings.options.get(name) for name in ("learning_rate", "gain", "cap")}
    asked = [f"{name}={value}" for name, value in given.items() if value is not None]
    chosen = (
        f"**Chosen by the user**, not on pilots: {', '.join(asked)}."
        if asked
        else f"**Pilots.** Runs of roberta-mini with the seeds {seeds}, which are not among the "
        "repeats, chose the rate 1e-2, tau = 1 and the targets: a target is the greatest of 0.1, "
        "0.03 and 0.01 nats that K*=1 reached in both pilots within a quarter of the cap. There "
        "were no pilots of BBT."
    )
    return (
        f"SST-2, {run['num_clients']} clients of 16 rows per class, prompts of "
        f"{run['prompt_len']} out of 200 tokens, mini-batches of {method['batch_size']} rows; "
        f"GS-BDPL and BDPL query about {method['num_samples']} prompts per client and round, AdamW "
        "has one state per client. A query is one prompt on one mini-batch.\n\n"
        "**Target.** In nats below the untrained expected loss of each repeat: the mean "
        f"cross-entropy of {probing.prompts} prompts drawn from alpha, each on {probing.rows} "
        "separate dev rows. (The theorem bounds the gradient of this loss; the paper's target is "
        "an accuracy that it does not name.) The target of BBT, which has no such distribution, is "
        f"of the loss of the deployable prompt on {probing.prompt_rows} dev rows. Noise and rows "
        "are the same in all measurements of a seed, and training does not use them. A repeat is "
        f"measured every {probing.queries} training queries, in whole rounds; the first "
        "measurement at or below the target counts.\n\n"
        f"{chosen} With a rate for each K*, it is the one of "
        f"{', '.join(f'{r:g}' for r in OWN_RATES)} that needed the fewest queries in the mean of "
        f"pilots with the seeds {seeds}.\n\n{about(TableQueries.name)}\n\n"
        "The columns on the prompt are the metric (x 100) of the deployable prompt, on "
        f"{probing.prompt_rows} dev rows, before the repeat and at its end.\n\n"
        "**Statistics.** A repeat that ends at the cap without its target is censored and counts "
        "as infinite. Medians are lower medians, which here are Kaplan-Meier's; their intervals "
        "lie between two order statistics and hold for any distribution. The trimmed mean leaves "
        "out the least and the greatest tenth (the paper's rule is not stated); censored repeats "
        "in it count as the cap. K*=1 is compared with each other K* by seed; intervals and p "
        "values are of one comparison each.\n"
    )
