"""figure-toy: queries against accuracy for several K*, on digits that are spread evenly."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fedone_sdk.errors import SpecError
from fedone_sdk.experiments.digits import find_digits
from fedone_sdk.experiments.experiment import Report, Results, Trial
from fedone_sdk.experiments.paper import about
from fedone_sdk.experiments.settings import Settings
from fedone_sdk.experiments.study import Design, Point, Study
from fedone_sdk.experiments.toy import Toy, toy_trial
from fedone_sdk.experiments.toy_report import Condition, draw_condition

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["FigureToy"]

_SPLITS: Mapping[str, tuple[str, float | None]] = {
    "iid": ("IID", None),
    "dirichlet0.5": ("Dirichlet 0.5", 0.5),
    "dirichlet0.1": ("Dirichlet 0.1", 0.1),
}
"""The name of a split in reports, and its concentration."""


class FigureToy(Study):
    """The paper's toy: one network, 100 clients, several K*.

    A split is how the digits are spread over the clients: a panel of the figure each.
    """

    name = "figure-toy"
    title = "Queries against accuracy: a small network on digits, IID clients"
    needs_data = False
    default_seeds = 10
    options = ("learning_rate", "max_queries")
    design = Design(
        base={"learning_rate": 0.01, "max_queries": 24_000},
        small={"max_queries": 2000},
        axes={"split": ("iid",), "clients_per_round": (1, 5, 10, 20, 40)},
        small_axes={"clients_per_round": (1, 10, 40)},
        key="{split}_k{clients_per_round}_s{seed}",
    )

    def trials(self, settings: Settings, results: Results) -> Sequence[Trial]:
        """One per split, K* and seed.

        Raises:
            DataError: The folder holds no digits.
            MissingExtraError: scikit-learn, which brings them otherwise, is not installed.
            SpecError: An option does not do.
        """
        find_digits(settings.data)
        return super().trials(settings, results)

    def trial(self, settings: Settings, key: str, point: Point, seed: int) -> Trial:
        """The trial of a toy; both figures have the IID runs."""
        home = FigureToy.name if point["split"] == "iid" else None
        return toy_trial(key, settings, self._toy(settings, point, seed), home=home)

    def report(self, settings: Settings, results: Results) -> Report:
        """Curves, queries to targets, and whether K*=1 needs the fewest."""
        toy = self._toy(settings, {"split": "iid", "clients_per_round": 1}, 0)
        found = [
            Condition(label=_SPLITS[split][0], runs=runs, max_queries=toy.max_queries)
            for split in self.grid(settings)["split"]
            if (runs := self.runs(settings, results, split=split))
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

    def _toy(self, settings: Settings, point: Point, seed: int) -> Toy:
        run = self.run(settings)
        return Toy(
            clients_per_round=point["clients_per_round"],
            seed=seed,
            dirichlet_alpha=_SPLITS[point["split"]][1],
            learning_rate=_positive(settings, "learning_rate", run["learning_rate"]),
            max_queries=int(_positive(settings, "max_queries", run["max_queries"])),
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
