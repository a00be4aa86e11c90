"""table-queries: LLM queries to a target for several K*, every repeat shown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from fedone_sdk.errors import SpecError
from fedone_sdk.experiments.experiment import Experiment, Report, Results, Trial
from fedone_sdk.experiments.federated import Tuning
from fedone_sdk.experiments.paper import about, printed
from fedone_sdk.experiments.passage import passage_trial
from fedone_sdk.experiments.probe import Probing
from fedone_sdk.experiments.queries_report import Passages, draw_passages
from fedone_sdk.experiments.rows import lacking
from fedone_sdk.experiments.settings import Settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["CONTENDERS", "Contender", "PILOTS", "TableQueries"]

PILOTS = (9001, 9002)
"""Seeds of the runs that learning rates, targets and caps were chosen on; never reported."""

_PROMPTS = 20
"""Of a step, where a method does not name another number."""

_QUICK: Mapping[str, Any] = {"num_samples": 4, "batch_size": 8}

_METHODS = ("gs-bdpl", "bdpl")


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A method with all that was fixed before its repeats were run.

    Attributes:
        label: What people call it.
        method: As in a run.
        gains: The target, see `Probing`; with several, the first one is the figure's.
        cap: Training queries at which a repeat is censored; whole rounds of every K*.
        paper: The paper's row; its numbers are means without outliers, for RoBERTa-large.
        backend_kind: Who must run the model; None is anybody.
    """

    label: str
    method: Mapping[str, Any]
    gains: Mapping[str, float]
    cap: int
    paper: str | None = None
    backend_kind: Literal["transformers"] | None = None


CONTENDERS: Mapping[str, Contender] = {
    "gs-bdpl": Contender(
        label="GS-BDPL (tau = 1)",
        method={"name": "gs-bdpl", "tau": 1.0, "learning_rate": 1e-2},
        gains={"expected_loss": 0.01},
        cap=2400,
    ),
    "bdpl": Contender(
        label="BDPL",
        method={"name": "bdpl", "learning_rate": 1e-2},
        gains={"expected_loss": 0.03},
        cap=2400,
        paper="bdpl",
    ),
    "gs-bdpl-tau0.1": Contender(
        label="GS-BDPL (tau = 0.1)",
        method={"name": "gs-bdpl", "tau": 0.1, "learning_rate": 1e-2},
        gains={"expected_loss": 0.01},
        cap=2400,
    ),
    # The two have targets by analogy only: no pilot was run. They need torch, and days on a CPU.
    "bbt": Contender(
        label="BBT, population 200",
        method={"name": "bbt", "num_samples": 200},
        gains={"prompt_loss": 0.02},
        cap=24_000,
        paper="bbt",
        backend_kind="transformers",
    ),
    "bbt-20": Contender(
        label="BBT, population 20",
        method={"name": "bbt", "num_samples": 20},
        gains={"prompt_loss": 0.02},
        cap=2400,
        backend_kind="transformers",
    ),
}
"""By the names that trials bear."""


class TableQueries(Experiment):
    """Queries to a target that was fixed beforehand, for K* clients per round.

    `Settings.options`: ``methods`` (of `CONTENDERS`, joined by commas; gs-bdpl and bdpl without
    it); ``learning_rate``, ``gain`` (of the first target, nats) and ``cap`` (training queries) in
    the place of what stands there, for all methods and K*.
    """

    name = "table-queries"
    title = "LLM queries to a target, for K* clients per round"
    default_seeds = 20
    options = ("cap", "gain", "learning_rate", "methods")

    def trials(self, settings: Settings, results: Results) -> Sequence[Trial]:
        """One per method, K* and seed.

        Raises:
            SpecError: There is no data, an option does not do, or a method cannot be run here.
        """
        return [
            self.trial(settings, name, clients, seed)
            for name in self.contenders(settings)
            for clients in self.clients(settings)
            for seed in range(settings.seeds)
        ]

    def report(self, settings: Settings, results: Results) -> Report:
        """The table, every repeat, K*=1 against the others, and the curves."""
        found = [self.passages(settings, name, results) for name in self.contenders(settings)]
        found = [passages for passages in found if passages.present]

        def draw(figure: Figure) -> None:
            figure.set_size_inches(1.0 + 4.5 * len(found), 7.5)
            rows = figure.subplots(2, len(found), squeeze=False)
            for number, passages in enumerate(found):
                draw_passages(rows[0][number], rows[1][number], passages)

        probing = self.probing(settings)
        parts = [
            f"![Queries to the target, and the curves]({self.name}.svg)\n",
            _rules(settings, probing),
            *(passages.markdown() for passages in found),
        ]
        return Report(
            markdown="\n".join(parts),
            data={
                "pilot_seeds": list(PILOTS),
                "probing": asdict(probing),
                "methods": {passages.label: passages.data() for passages in found},
            },
            figures={self.name: draw},
        )

    @classmethod
    def passages(cls, settings: Settings, name: str, results: Results) -> Passages:
        """What is known of a contender."""
        contender = cls.contenders(settings)[name]
        return Passages(
            label=contender.label,
            learning_rate=contender.method.get("learning_rate"),
            gains=contender.gains,
            cap=contender.cap,
            paper=_paper(contender),
            runs={
                clients: {
                    seed: results[key]
                    for seed in range(settings.seeds)
                    if (key := _key(name, clients, seed)) in results
                }
                for clients in cls.clients(settings)
            },
        )

    @staticmethod
    def contenders(settings: Settings) -> dict[str, Contender]:
        """The methods that were asked for, with the settings that were.

        Raises:
            SpecError: An option does not do.
        """
        asked = settings.options.get("methods", ",".join(_METHODS)).split(",")
        if unknown := set(asked) - CONTENDERS.keys():
            raise SpecError(
                f"--set methods: there is no {', '.join(sorted(unknown))}; {', '.join(CONTENDERS)}",
                source="arguments",
            )
        for name in asked:
            found = CONTENDERS[name]
            packages = ("cmaes",) if found.method["name"] == "bbt" else ()
            if why := lacking(found.backend_kind, packages, settings):
                raise SpecError(f"--set methods: {name} cannot be run: {why}", source="arguments")
        return {
            name: _adapted(CONTENDERS[name], settings, TableQueries.clients(settings))
            for name in asked
        }

    @staticmethod
    def clients(settings: Settings) -> tuple[int, ...]:
        """The K* of the table."""
        return (1, 3) if settings.quick else (1, 3, 10, 30)

    @classmethod
    def trial(cls, settings: Settings, name: str, clients: int, seed: int) -> Trial:
        """One repeat.

        Args:
            settings: What the user asked for.
            name: Of the contender.
            clients: K*.
            seed: Of the run.

        Raises:
            SpecError: There is no data, or an option does not do.
        """
        contender = cls.contenders(settings)[name]
        per_round = clients * contender.method.get("num_samples", _PROMPTS)
        tuning = cls.tuning(
            settings,
            contender,
            seed=seed,
            clients_per_round=clients,
            rounds=contender.cap // per_round,
        )
        probing = replace(cls.probing(settings), gains=contender.gains)
        return passage_trial(_key(name, clients, seed), settings, tuning, probing)

    @staticmethod
    def tuning(settings: Settings, contender: Contender, **given: Any) -> Tuning:
        """A contender's run on SST-2."""
        size = {"num_clients": 10, "prompt_len": 5} if settings.quick else {}
        soft = {"vocab_size": None} if contender.method["name"] == "bbt" else {}
        return Tuning(
            task="sst2",
            method=dict(contender.method),
            backend_kind=contender.backend_kind,
            **{**size, **soft, **given},
        )

    @staticmethod
    def probing(settings: Settings) -> Probing:
        """How runs are measured."""
        return Probing(queries=8, prompts=8, prompt_rows=32) if settings.quick else Probing()


def _paper(contender: Contender) -> dict[int, float]:
    """Queries by K*."""
    paper = printed(TableQueries.name)
    column = paper["columns"].index("queries")
    rows = {} if contender.paper is None else paper["rows"][contender.paper]
    return {clients: cells[column][0] for clients, cells in rows.items()}


def _key(name: str, clients: int, seed: int) -> str:
    return f"{name}_k{clients}_s{seed}"


def _adapted(contender: Contender, settings: Settings, clients: Sequence[int]) -> Contender:
    method, gains, cap = dict(contender.method), dict(contender.gains), contender.cap
    if settings.quick:
        method |= _QUICK
        cap = 6 * _QUICK["num_samples"]
    if (rate := _number(settings, "learning_rate")) is not None and "learning_rate" in method:
        method["learning_rate"] = rate
    if (gain := _number(settings, "gain")) is not None:
        gains[next(iter(gains))] = gain
    if (asked := _number(settings, "cap")) is not None:
        whole = math.lcm(*(each * method.get("num_samples", _PROMPTS) for each in clients))
        if asked % whole:
            raise SpecError(
                f"--set cap: {asked:g} is no multiple of {whole}, whole rounds of every K*",
                source="arguments",
            )
        cap = int(asked)
    return replace(contender, method=method, gains=gains, cap=cap)


def _number(settings: Settings, name: str) -> float | None:
    text = settings.options.get(name)
    if text is None:
        return None
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0.0 < number < math.inf:
        raise SpecError(f"--set {name}: {text!r} is no positive number", source="arguments")
    return number


def _rules(settings: Settings, probing: Probing) -> str:
    """What was fixed beforehand."""
    clients, length, prompts, rows = (10, 5, 4, 8) if settings.quick else (100, 20, 20, 32)
    quick = (
        "**--quick: tiny runs that show that everything works; the numbers mean nothing.** "
        if settings.quick
        else ""
    )
    return (
        f"{quick}SST-2, {clients} clients of 16 rows per class, prompts of {length} out of 200 "
        f"tokens, mini-batches of {rows} rows; GS-BDPL and BDPL ask about {prompts} prompts per "
        "client and round, and each client keeps the state of its AdamW for itself. A query is one "
        "prompt on one mini-batch.\n\n"
        "**Target.** Fixed beforehand, for each repeat in nats below its own start: the untrained "
        f"expected loss, that is the mean cross-entropy of {probing.prompts} prompts drawn from "
        f"alpha, each on {probing.rows} dev rows of its own. (FedOne's own evaluation draws from "
        "alpha too, and its theorem bounds the gradient of this loss; the paper's target is an "
        "accuracy that it does not name.) BBT has no alpha to draw from: its start and its target "
        f"are the loss of the deployable prompt on {probing.prompt_rows} dev rows. Noise and rows "
        "of the measurement are the same in all measurements of a repeat, and for all K* of a "
        "seed; nothing measured goes back into training, or counts as a query. Measured every "
        f"{probing.queries} training queries, rounded down to whole rounds, or every round where a "
        "round has more; the first "
        "measurement at or below the target counts, so that a curve that swings reaches it sooner "
        "than a smooth one of the same mean.\n\n"
        f"{_pilots(settings)}\n\n{about(TableQueries.name)}\n\n"
        "The columns on the prompt are the metric (x 100) of the deployable prompt, the "
        f"mode of alpha, on {probing.prompt_rows} dev rows, before and where the repeat ended.\n\n"
        "**Statistics.** A repeat that ends at the cap without its target is censored and counts "
        "as infinite. Medians are lower medians, which here are Kaplan-Meier's; their intervals "
        "lie between two order statistics and hold for any distribution. The trimmed mean leaves "
        "out the least and the greatest tenth of the repeats; the paper's outlier rule is not "
        "stated, so this one is ours, and censored repeats that are left in count as the cap. "
        "K*=1 is compared with each other K* by seed; intervals and p values are of one comparison "
        "each.\n"
    )


def _pilots(settings: Settings) -> str:
    """How rates and targets came about."""
    given = {name: settings.options.get(name) for name in ("learning_rate", "gain", "cap")}
    if asked := [f"{name}={value}" for name, value in given.items() if value is not None]:
        return f"**Chosen by the user**, not on pilots: {', '.join(asked)}."
    return (
        f"**Pilots.** Runs of roberta-mini with the seeds {', '.join(map(str, PILOTS))}, which are "
        "not among the repeats, K*=1. At 3e-4, the largest of the paper's learning rates, the "
        "expected loss of GS-BDPL hardly moved in 4,000 queries (one seed). At tau = 0.1, its "
        "default, a step compares few tokens, and neither 1e-2 nor 3e-2 made it fall on both seeds "
        "within 2,400; so it stands here with tau = 1. Both methods have the rate 1e-2, for every "
        "K*. A target is the greatest of 0.1, 0.03 and 0.01 nats that K*=1 reached in "
        "both pilots within a quarter of the cap. A rate that suits K*=1 need not suit others: "
        "with a rate tuned for each K*, all may need the same. Of BBT there were no pilots."
    )
