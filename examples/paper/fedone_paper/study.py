"""An experiment as a declaration: one run, what differs along its axes, seeds, learning rates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, ClassVar

from fedone_paper.experiment import Experiment, Results
from fedone_paper.federated import Tuning, tuning_trial
from fedone_paper.settings import Settings
from fedone_paper.summary import number
from fedone_sdk.evaluation.engine import Result, Trial

Point = Mapping[str, Any]
"""A value on each axis; for a trial also its ``seed`` and its learning ``rate`` (None: none)."""

Runs = Mapping[Any, Mapping[Any, Result]]
"""Results by a value on the last axis, and by seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """What a study runs.

    Attributes:
        axes: What differs: values by attribute of the run, the outermost axis first.
        key: Names a trial by its point, as `str.format` does.
        base: Attributes that all runs share (of `Tuning`, where the study has no `trial` of its
            own).
        small_axes: Axes of ``--quick``.
        small: What ``--quick`` changes of `base`.
        pilot_key: Names a pilot: a run that learning rates are compared by.
        pilot_seeds: Seeds of the pilots; they are never reported.
    """

    axes: Mapping[str, Sequence[Any]]
    key: str = ""
    base: Mapping[str, Any] = field(default_factory=dict)
    small_axes: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    small: Mapping[str, Any] = field(default_factory=dict)
    pilot_key: str = ""
    pilot_seeds: Sequence[int] = ()


class Study(Experiment):
    """One run at every point of a grid, repeated over seeds.

    Where a point has several learning rates, pilots with other seeds run first, and the repeats
    use the best of these rates.

    Attributes:
        design: The runs. The user's tasks replace the values of an axis ``task``.
    """

    design: ClassVar[Design]

    def run(self, settings: Settings) -> dict[str, Any]:
        """Return what all runs share, with the numbers that the user gives.

        Raises:
            SpecError: One is not positive, or not whole where it must be.
        """
        run = changed(self.design.base, self.design.small if settings.quick else {})
        method, options = run.get("method", {}), settings.options
        asked = {name: number(options, name, run[name]) for name in options.keys() & run.keys()}
        inner = {name: number(options, name, method[name]) for name in options.keys() & method}
        return changed(run, {**asked, **({"method": inner} if inner else {})})

    def grid(self, settings: Settings) -> dict[str, Sequence[Any]]:
        """Return the values on each axis."""
        grid = {**self.design.axes, **(self.design.small_axes if settings.quick else {})}
        return {**grid, "task": settings.tasks} if "task" in grid and settings.tasks else grid

    def seeds(self, settings: Settings, point: Point) -> Iterable[int | None]:
        """Return the seeds of a point; None where the result does not depend on it."""
        return range(settings.seeds)

    def key(self, point: Point) -> str:
        """Return the key of the trial of a point."""
        return self.design.key.format(**point)

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
        """Return the pilots, then one trial per seed and point.

        An interrupted study has whole rows of its table.
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
        for seed in self.design.pilot_seeds:
            pilot = {**point, "seed": seed, "rate": rate}
            yield self.design.pilot_key.format(**pilot), pilot

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
