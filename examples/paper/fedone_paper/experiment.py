"""Experiments: independent trials, and a report of their results. They are found by their names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from fedone_sdk.errors import ArgumentError
from fedone_sdk.evaluation.engine import Result, Trial

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fedone_paper.settings import Settings


Results = Mapping[str, Result]
"""Results by the keys of their trials. One that failed is absent."""

Draw = Callable[["Figure"], None]
"""Draws on an empty figure and may set its size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """An experiment's results for readers and programs.

    Attributes:
        markdown: Tables and sentences, without a title. A figure is shown by
            ``![what it shows](NAME.svg)``.
        data: The same numbers for programs, as JSON holds them.
        figures: The figures by their names; each becomes NAME.svg and NAME.png.
    """

    markdown: str
    data: dict[str, Any]
    figures: Mapping[str, Draw] = field(default_factory=dict)


class Experiment(ABC):
    """One of the paper's tables or figures.

    Attributes:
        name: Its name on the command line.
        title: What it shows, one line.
        needs_data: Whether `Settings.data` must name a folder of GLUE tasks.
        default_seeds: Repeats, unless the user gives a number.
        options: The names that it takes of `Settings.options`.
        takes: The optional `Settings` that it uses: ``tasks``, and those of a paid model.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    needs_data: ClassVar[bool] = True
    default_seeds: ClassVar[int] = 3
    options: ClassVar[tuple[str, ...]] = ()
    takes: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def trials(self, settings: Settings, results: Results) -> Sequence[Trial]:
        """Return the trials that are known so far.

        Called again when they are done, until it returns no new ones: later trials may depend on
        the results of earlier ones (a learning rate on its search).

        Args:
            settings: What the user asked for.
            results: Of the earlier trials; empty at first.

        Raises:
            SpecError: The settings are wrong.
        """

    @abstractmethod
    def report(self, settings: Settings, results: Results) -> Report:
        """Return the report. Trials that failed are absent from `results`."""


EXPERIMENTS: Mapping[str, str] = {
    "table1": "method_table:Table1",
    "table-fedavg": "method_table:TableFedavg",
    "table2": "table2:Table2",
    "table3": "table3:Table3",
    "figure-toy": "figure_toy:FigureToy",
    "figure-heterogeneity": "figure_toy:FigureHeterogeneity",
    "table-queries": "table_queries:TableQueries",
    "figure-prompt-length": "sweeps:FigurePromptLength",
    "table-clients": "sweeps:TableClients",
    "figure-theory": "figure_theory:FigureTheory",
}
"""The experiments: name -> ``module:class`` of this package."""


def find_experiment(name: str) -> Experiment:
    """Return an experiment by its name.

    Raises:
        SpecError: There is none of that name.
    """
    if name not in EXPERIMENTS:
        known = ", ".join(EXPERIMENTS)
        raise ArgumentError(f"NAME: there is no experiment {name!r}; {known}")
    module, _, kind = EXPERIMENTS[name].partition(":")
    found: Experiment = getattr(import_module(f"fedone_paper.{module}"), kind)()
    return found
