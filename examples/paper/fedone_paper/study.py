"""Studies: tables and figures as `studies.yaml` declares them, with their trials and reports."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.resources import files
from itertools import product
from typing import TYPE_CHECKING, Any

from fedone_paper.federated import Tuning, tuning_trial
from fedone_paper.settings import Settings
from fedone_paper.summary import number
from fedone_sdk.errors import ArgumentError
from fedone_sdk.evaluation.engine import Result, Trial

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Results = Mapping[str, Result]
"""Results by the keys of their trials. One that failed is absent."""

Draw = Callable[["Figure"], None]
"""Draws on an empty figure and may set its size."""

Point = Mapping[str, Any]
"""A value on each axis; for a trial also its ``seed`` and its learning ``rate`` (None: none)."""

Runs = Mapping[Any, Mapping[Any, Result]]
"""Results by a value on the last axis, and by seed."""


@cache
def declared() -> Mapping[str, Any]:
    """Return what `studies.yaml` says."""
    import yaml

    text = (files("fedone_paper") / "studies.yaml").read_text(encoding="utf-8")
    found: Mapping[str, Any] = yaml.safe_load(text)
    return found


def find_study(name: str) -> Study:
    """Return a study by its name.

    Raises:
        SpecError: There is none of that name.
    """
    studies = declared()["studies"]
    if name not in studies:
        raise ArgumentError(f"NAME: there is no study {name!r}; {', '.join(studies)}")
    module, _, kind = studies[name]["class"].partition(":")
    found: Study = getattr(import_module(f"fedone_paper.{module}"), kind)(name)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A study's results for readers.

    Attributes:
        markdown: Tables and sentences, without a title. A figure is shown by
            ``![what it shows](NAME.svg)``.
        figures: The figures by their names; each becomes NAME.svg and NAME.png.
    """

    markdown: str
    figures: Mapping[str, Draw] = field(default_factory=dict)


class Study(ABC):
    """One run at every point of a grid, repeated over seeds.

    Where a point has several learning rates, pilots with other seeds run first, and the repeats
    use the best of these rates.

    Attributes:
        said: What `studies.yaml` says of it; the keys are explained there.
    """

    def __init__(self, name: str) -> None:
        self.name, self.said = name, declared()["studies"][name]
        self.title: str = self.said["title"]
        self.needs_data: bool = self.said.get("needs_data", True)
        self.default_seeds: int = self.said.get("seeds", 3)
        self.options: Sequence[str] = self.said.get("options", ())

    def text(self, name: str, /, **values: Any) -> str:
        """Return one of its texts with values."""
        text: str = self.said["texts"][name]
        return text.format(**values)

    @abstractmethod
    def report(self, settings: Settings, results: Results) -> Report:
        """Return the report. Trials that failed are absent from `results`."""

    def run(self, settings: Settings) -> dict[str, Any]:
        """Return what all runs share, with the numbers that the user gives.

        Raises:
            SpecError: One is not positive, or not whole where it must be.
        """
        run = changed(self.said["base"], self.said["small"] if settings.quick else {})
        method, options = run.get("method", {}), settings.options
        asked = {name: number(options, name, run[name]) for name in options.keys() & run.keys()}
        inner = {name: number(options, name, method[name]) for name in options.keys() & method}
        return changed(run, {**asked, **({"method": inner} if inner else {})})

    def grid(self, settings: Settings) -> dict[str, Sequence[Any]]:
        """Return the values on each axis."""
        grid = {**self.said["axes"], **(self.said["small_axes"] if settings.quick else {})}
        return {**grid, "task": settings.tasks} if "task" in grid and settings.tasks else grid

    def seeds(self, settings: Settings, point: Point) -> Iterable[int | None]:
        """Return the seeds of a point; None where the result does not depend on it."""
        return range(settings.seeds)

    def key(self, point: Point) -> str:
        """Return the key of the trial of a point."""
        key: str = self.said["key"].format(**point)
        return key

    def trial(self, settings: Settings, key: str, point: Point) -> Trial:
        """Return the trial of a point: by default a tuning run of its attributes."""
        tuning = {name: value for name, value in point.items() if name != "rate"}
        return tuning_trial(key, settings, Tuning(**changed(self.run(settings), tuning)))

    def rates(self, settings: Settings, point: Point) -> Sequence[float]:
        """Return the learning rates that pilots choose from; none where nothing is chosen."""
        return ()

    def pilot(self, settings: Settings, key: str, point: Point) -> Trial:
        """Return the trial of a pilot."""
        return self.trial(settings, key, point)

    def loss(self, settings: Settings, point: Point, pilots: Sequence[Result]) -> tuple[float, ...]:
        """Return the value that the best learning rate has the least of; ties go to the first."""
        raise NotImplementedError

    def rate(self, settings: Settings, point: Point, results: Results) -> float | None:
        """Return the learning rate of a point: the best of its pilots; None without any result."""
        losses = {}
        for rate in self.rates(settings, point):
            keys = [key for key, _ in self._pilots(point, rate)]
            if pilots := [results[key] for key in keys if key in results]:
                losses[rate] = self.loss(settings, point, pilots)
        return min(losses, key=lambda rate: losses[rate], default=None)

    def trials(self, settings: Settings, results: Results) -> Sequence[Trial]:
        """Return the trials that are known so far: the pilots, then one trial per seed and point.

        Called again when they are done, until it returns no new ones. An interrupted study has
        whole rows of its table.

        Raises:
            SpecError: The settings are wrong.
        """
        pilots: list[Trial] = []
        repeats: list[Point] = []
        for point in self._points(settings):
            rates = self.rates(settings, point)
            rate = self.rate(settings, point, results)
            pilots += [
                self.pilot(settings, key, pilot)
                for each in rates
                for key, pilot in self._pilots(point, each)
            ]
            if rate is not None or not rates:
                seeds = self.seeds(settings, point)
                repeats += [{**point, "seed": seed, "rate": rate} for seed in seeds]
        repeats.sort(key=lambda point: point["seed"] or 0)
        return [*pilots, *(self.trial(settings, self.key(point), point) for point in repeats)]

    def runs(self, settings: Settings, results: Results, **outer: Any) -> Runs:
        """Return the results along the last axis, at values `outer` of the others, if any."""
        last = [*self.grid(settings)][-1]
        points = [point for point in self._points(settings) if outer.items() <= point.items()]
        found = {
            point[last]: {
                seed: results[key]
                for seed in self.seeds(settings, point)
                if (key := self.key({**point, "seed": seed})) in results
            }
            for point in points
        }
        return {value: runs for value, runs in found.items() if runs}

    def _pilots(self, point: Point, rate: float) -> Iterator[tuple[str, Point]]:
        for seed in self.said.get("pilot_seeds", ()):
            pilot = {**point, "seed": seed, "rate": rate}
            yield self.said["pilot_key"].format(**pilot), pilot

    def _points(self, settings: Settings) -> Iterator[dict[str, Any]]:
        grid = self.grid(settings)
        for values in product(*grid.values()):
            yield dict(zip(grid, values, strict=True))


def changed(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a description with changes; a mapping within it is changed key by key."""
    found = dict(base)
    for name, value in changes.items():
        held = found.get(name)
        both = isinstance(held, Mapping) and isinstance(value, Mapping)
        found[name] = {**(held or {}), **value} if both else value
    return found
