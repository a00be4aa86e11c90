"""An experiment as a declaration: one run, what differs along its axes, and seeds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, ClassVar

from fedone_sdk.experiments.experiment import Experiment, Result, Results, Trial
from fedone_sdk.experiments.federated import Tuning, tuning_trial
from fedone_sdk.experiments.settings import Settings
from fedone_sdk.experiments.summary import number

Point = Mapping[str, Any]
"""A value on each axis."""

Runs = Mapping[Any, Mapping[int, Result]]
"""Results by a value on the last axis, and by seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """What a study runs.

    Attributes:
        axes: What differs: values by attribute of the run, the outermost axis first.
        key: Names a trial by its point and ``seed``, as `str.format` does.
        base: Attributes that all runs share (of `Tuning`, where the study has no `trial` of its
            own).
        small_axes: Axes of ``--quick``.
        small: What ``--quick`` changes of `base`.
    """

    axes: Mapping[str, Sequence[Any]]
    key: str = ""
    base: Mapping[str, Any] = field(default_factory=dict)
    small_axes: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    small: Mapping[str, Any] = field(default_factory=dict)


class Study(Experiment):
    """One run at every point of a grid, repeated over seeds.

    Attributes:
        design: The runs. The user's tasks take the place of the values of an axis ``task``.
    """

    design: ClassVar[Design]

    def run(self, settings: Settings) -> dict[str, Any]:
        """What all runs share, with the numbers that the user gives.

        Raises:
            SpecError: One is not positive, or not whole where it must be.
        """
        run = changed(self.design.base, self.design.small if settings.quick else {})
        method, options = run.get("method", {}), settings.options
        asked = {name: number(options, name, run[name]) for name in options.keys() & run.keys()}
        inner = {name: number(options, name, method[name]) for name in options.keys() & method}
        return changed(run, {**asked, **({"method": inner} if inner else {})})

    def grid(self, settings: Settings) -> dict[str, Sequence[Any]]:
        """The values on each axis."""
        grid = {**self.design.axes, **(self.design.small_axes if settings.quick else {})}
        return {**grid, "task": settings.tasks} if "task" in grid and settings.tasks else grid

    def seeds(self, settings: Settings, point: Point) -> Iterable[int]:
        """The seeds of a point."""
        return range(settings.seeds)

    def trial(self, settings: Settings, key: str, point: Point, seed: int) -> Trial:
        """The trial of a point and a seed.

        Raises:
            SpecError: There is no data, or no such run.
        """
        return tuning_trial(key, settings, Tuning(**changed(self.run(settings), point), seed=seed))

    def trials(self, settings: Settings, results: Results) -> Sequence[Trial]:
        """One per point and seed; first all points with the first seed.

        Raises:
            SpecError: There is no data, or no such run.
        """
        return [
            self.trial(settings, self.design.key.format(**point, seed=seed), point, seed)
            for seed, point in self._repeats(settings)
        ]

    def runs(self, settings: Settings, results: Results, **outer: Any) -> Runs:
        """The results along the last axis, without values that have none.

        Args:
            settings: What the user asked for.
            results: Of the trials.
            outer: The values on the axes before it.
        """
        last = [*self.grid(settings)][-1]
        points = [point for point in self._points(settings) if outer.items() <= point.items()]
        found = {
            point[last]: {
                seed: results[key]
                for seed in self.seeds(settings, point)
                if (key := self.design.key.format(**point, seed=seed)) in results
            }
            for point in points
        }
        return {value: runs for value, runs in found.items() if runs}

    def _repeats(self, settings: Settings) -> list[tuple[int, dict[str, Any]]]:
        """Seeds and points, by seed: an interrupted study has whole rows of its table."""
        found = [
            (seed, one) for one in self._points(settings) for seed in self.seeds(settings, one)
        ]
        return sorted(found, key=lambda repeat: repeat[0])

    def _points(self, settings: Settings) -> Iterator[dict[str, Any]]:
        grid = self.grid(settings)
        for values in product(*grid.values()):
            yield dict(zip(grid, values, strict=True))


def changed(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A description with changes; a mapping within it is changed key by key."""
    found = dict(base)
    for name, value in changes.items():
        held = found.get(name)
        both = isinstance(held, Mapping) and isinstance(value, Mapping)
        found[name] = {**(held or {}), **value} if both else value
    return found
