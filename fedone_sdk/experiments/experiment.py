"""What an experiment is: trials that do not know of each other, and a report of their results."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fedone_sdk.experiments.settings import Settings

__all__ = [
    "Draw",
    "Experiment",
    "Report",
    "Result",
    "Results",
    "Trial",
    "TrialFunction",
    "Workspace",
]

_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.=+-]{0,150}")

Result = dict[str, Any]
"""What a trial found, as JSON holds it. A ``note`` is shown to the user when the trial ends, and
``model`` is the fingerprint of the model that it asked."""

Results = Mapping[str, Result]
"""Results by the keys of their trials. One that failed is absent."""

Draw = Callable[["Figure"], None]
"""Draws on an empty figure, whose size it may set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """Where a trial works.

    Attributes:
        inputs: The trial's input files and folders, by the names that it gave them.
        folder: A folder of the trial's own, made by its first use of `file`: what lies there helps
            the next attempt at the same trial (paid answers), and may be deleted at any time.
    """

    inputs: Mapping[str, Path]
    folder: Path

    def file(self, name: str) -> Path:
        """A file of the trial's own."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return self.folder / name


TrialFunction = Callable[[dict[str, Any], Workspace], Result]
"""Runs a trial, in a process of its own: a function at the top of a module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One piece of work, such as one method on one task with one seed.

    Attributes:
        key: Its name within the experiment; a file is named by it.
        run: What does it.
        options: All that its result depends on besides `inputs`, as JSON holds it: a result is used
            again only where they are the same. Paths do not belong here.
        inputs: Files and folders that it reads. Their contents count as well, not their places.
        home: The experiment that keeps its result, where another one has the very same trial; None
            is the one that names it.
        function: What its record calls `run`, where that was moved since; None is its place.
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
    """What an experiment says of its results.

    Attributes:
        markdown: The tables and what there is to say, without a title of the whole. A figure is
            shown by ``![what it shows](NAME.svg)``.
        data: The same numbers for programs, as JSON holds them.
        figures: The figures by their names; each becomes NAME.svg and NAME.png.
    """

    markdown: str
    data: dict[str, Any]
    figures: Mapping[str, Draw] = field(default_factory=dict)


class Experiment(ABC):
    """One of the paper's tables or figures.

    Attributes:
        name: What `fedone reproduce` calls it.
        title: What it shows, one line.
        needs_data: Whether `Settings.data` must name a folder of GLUE tasks.
        default_seeds: Repeats where the user names no number.
        options: What of `Settings.options` it knows.
        takes: Which of the `Settings` that only some experiments look at it does: ``tasks``, and
            those of a paid model.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    needs_data: ClassVar[bool] = True
    default_seeds: ClassVar[int] = 3
    options: ClassVar[tuple[str, ...]] = ()
    takes: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def trials(self, settings: Settings, results: Results) -> Sequence[Trial]:
        """What is to be done, as far as it is known yet.

        Called again when all that it named is done, until it names nothing new; so later trials
        may depend on the results of earlier ones (a learning rate on its search). Most experiments
        need only one stage, and do not look at `results`.

        Args:
            settings: What the user asked for.
            results: Of the trials named before; empty at first.

        Raises:
            SpecError: The settings do not do.
        """

    @abstractmethod
    def report(self, settings: Settings, results: Results) -> Report:
        """Says what was found. Trials that failed are absent from `results`."""
