"""Experiments: independent trials, and a report of their results. They are found by their names."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from fedone_sdk.errors import ArgumentError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fedone_paper.settings import Settings


_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.=+-]{0,150}")

Result = dict[str, Any]
"""A trial's result, as JSON holds it. A ``note`` is shown when the trial ends, and ``model`` is the
fingerprint of its model."""

Results = Mapping[str, Result]
"""Results by the keys of their trials. One that failed is absent."""

Draw = Callable[["Figure"], None]
"""Draws on an empty figure and may set its size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """The inputs and the folder of a trial.

    Attributes:
        inputs: The trial's input files and folders by name.
        folder: The trial's folder, made by the first use of `file`. It keeps paid answers for the
            next attempt at the same trial, and may be deleted at any time.
    """

    inputs: Mapping[str, Path]
    folder: Path

    def file(self, name: str) -> Path:
        """Return a file in the trial's folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.folder / name


TrialFunction = Callable[[dict[str, Any], Workspace], Result]
"""Runs a trial in a separate process: a function at the top of a module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One piece of work, such as one method on one task with one seed.

    Attributes:
        key: Its name within the experiment, also that of its file.
        run: The function.
        options: All that its result depends on besides `inputs`, as JSON holds it, without paths.
            A result is used again only with the same options.
        inputs: Files and folders that it reads; their contents are part of its identity.
        home: The experiment that keeps its result, if several have it; None is the current one.
        function: The name of `run` in records, if it has moved since; None is its place.
    """

    key: str
    run: TrialFunction
    options: dict[str, Any]
    inputs: Mapping[str, Path] = field(default_factory=dict)
    home: str | None = None
    function: str | None = None

    def __post_init__(self) -> None:
        if not _KEY.fullmatch(self.key):
            raise ValueError(f"{self.key!r} is no key of a trial: {_KEY.pattern}")


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
