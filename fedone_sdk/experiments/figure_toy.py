"""figure-toy: queries against accuracy for several K*, on digits that are spread evenly."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedone_sdk.errors import SpecError
from fedone_sdk.experiments.digits import find_digits
from fedone_sdk.experiments.experiment import Experiment, Report, Result, Results, Trial
from fedone_sdk.experiments.paper import about
from fedone_sdk.experiments.settings import Settings
from fedone_sdk.experiments.toy import Toy, toy_trial
from fedone_sdk.experiments.toy_report import Condition, draw_condition

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["FigureToy", "Split"]


@dataclass(frozen=True, slots=True)
class Split:
    """How the digits are spread over the clients.

    Attributes:
        key: In the names of trials.
        label: What people call it.
        dirichlet_alpha: Concentration; None is IID.
    """

    key: str
    label: str
    dirichlet_alpha: float | None = None


class FigureToy(Experiment):
    """The paper's toy: one network, 100 clients, several K*.

    Attributes:
        splits: How the digits are spread over the clients; a panel of the figure each.
    """

    name = "figure-toy"
    title = "Queries against accuracy: a small network on digits, IID clients"
    needs_data = False
    default_seeds = 10
    options = ("learning_rate", "max_queries")
    splits: ClassVar[tuple[Split, ...]] = (Split("iid", "IID"),)

    def trials(self, settings: Settings, results: Results) -> Sequence[Trial]:
        """One per split, K* and seed.

        Raises:
            DataError: The folder holds no digits.
            MissingExtraError: scikit-learn, which brings them otherwise, is not installed.
            SpecError: An option does not do.
        """
        find_digits(settings.data)
        return [
            toy_trial(
                _key(split, clients, seed),
                settings,
                self._toy(settings, split, clients, seed),
                # Both figures have the IID runs.
                home=FigureToy.name if split.dirichlet_alpha is None else None,
            )
            for split in self.splits
            for clients in _clients(settings)
            for seed in range(settings.seeds)
        ]

    def report(self, settings: Settings, results: Results) -> Report:
        """Curves, queries to targets, and whether K*=1 needs the fewest."""
        toy = self._toy(settings, self.splits[0], 1, 0)
        found = [
            Condition(label=split.label, runs=runs, max_queries=toy.max_queries)
            for split in self.splits
            if (runs := _runs(settings, split, results))
        ]

        def draw(figure: Figure) -> None:
            figure.set_size_inches(1.5 + 4.5 * len(found), 4)
            panels = figure.subplots(1, len(found), sharey=True, squeeze=False)[0]
            for axes, condition in zip(panels, found, strict=True):
                draw_condition(axes, condition)

        tables = "\n".join(f"## {condition.label}\n\n{condition.markdown()}" for condition in found)
        caption = f"{_caption(toy, results)} {about(self.name)}"
        return Report(
            markdown=f"![{self.title}]({self.name}.svg)\n\n{caption}\n\n{tables}",
            data={"caption": caption, "splits": [condition.data() for condition in found]},
            figures={self.name: draw},
        )

    def _toy(self, settings: Settings, split: Split, clients: int, seed: int) -> Toy:
        return Toy(
            clients_per_round=clients,
            seed=seed,
            dirichlet_alpha=split.dirichlet_alpha,
            learning_rate=_positive(settings, "learning_rate", 0.01),
            max_queries=int(_positive(settings, "max_queries", 2000 if settings.quick else 24_000)),
            # MNIST's test split is large, and a visit there takes 38 queries.
            measure_every=20 if settings.data is None else 200,
        )


def _positive(settings: Settings, option: str, default: float) -> float:
    given = settings.options.get(option)
    try:
        value = default if given is None else float(given)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise SpecError(f"--set {option}: must be a positive number", source="arguments")
    return value


def _clients(settings: Settings) -> tuple[int, ...]:
    return (1, 10, 40) if settings.quick else (1, 5, 10, 20, 40)


def _key(split: Split, clients: int, seed: int) -> str:
    return f"{split.key}_k{clients}_s{seed}"


def _runs(settings: Settings, split: Split, results: Results) -> Mapping[int, Mapping[int, Result]]:
    by_clients = {
        clients: {
            seed: results[key]
            for seed in range(settings.seeds)
            if (key := _key(split, clients, seed)) in results
        }
        for clients in _clients(settings)
    }
    return {clients: runs for clients, runs in by_clients.items() if runs}


def _caption(toy: Toy, results: Results) -> str:
    some = next(iter(results.values()))
    network = f"MLP {some['pixels']}-{toy.num_hidden}-10 with dropout 0.2"
    sizes = sorted({tuple(result["rows"]) for result in results.values()})
    smallest, largest = min(size[0] for size in sizes), max(size[2] for size in sizes)
    held = f"{smallest} rows" if smallest == largest else f"{smallest} to {largest} rows"
    bundled = (
        " The paper uses MNIST (784 pixels, 600 rows a client); --data takes a folder with its "
        "files. With so few rows a client's epoch is mostly one mini-batch, smaller than the "
        f"{toy.batch_size} rows it could have."
        if some["pixels"] == 64
        else ""
    )
    return (
        f"Data: {some['data']}. {network}; {toy.num_clients} clients of {held}; learning rate "
        f"{toy.learning_rate} for every K*, mini-batches of {toy.batch_size}, {toy.local_epochs} "
        "local epochs, FedAvg weighted by rows. A query is the forward pass of one mini-batch: a "
        "client's visit makes (local epochs) x (mini-batches of its rows) of them, and visits of "
        "one round add up. Lines are means over seeds, bands one standard deviation. Tables: the "
        f"median over seeds of the queries until the test accuracy, measured every "
        f"{toy.measure_every} queries or round, first reached a target; runs end at "
        f"{toy.max_queries:,} queries, and those that had not reached it by then are censored. "
        "(A curve that swings reaches a target sooner than a smooth one of the same mean.) "
        "Intervals are of one comparison each." + bundled
    )
