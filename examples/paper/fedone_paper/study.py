"""Studies: tables and figures as `studies.yaml` declares them, with their trials and reports."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import fedone_sdk
from fedone_paper.federated import Tuning, run_trial, run_tuning
from fedone_paper.settings import Settings, declared
from fedone_paper.tables import number
from fedone_sdk.errors import ArgumentError, MissingExtraError
from fedone_sdk.evaluation.engine import (
    Progress,
    Record,
    Records,
    Result,
    Session,
    Trial,
    write_whole,
)

Results = Mapping[str, Result]
"""Results by the keys of their trials; failed trials are absent."""

Point = Mapping[str, Any]
"""A value on each axis. For a trial it also has ``seed`` and the learning ``rate``, or None."""

Runs = Mapping[Any, Mapping[Any, Result]]
"""Results by a value on the last axis, and by seed."""


def find_study(name: str) -> Study:
    """Return a study by its name.

    Raises:
        SpecError: There is no study with this name.
    """
    studies = declared()["studies"]
    if name not in studies:
        raise ArgumentError(f"NAME: there is no study {name!r}; {', '.join(studies)}")
    module, _, kind = studies[name]["class"].partition(":")
    found: Study = getattr(import_module(f"fedone_paper.{module}"), kind)(name)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The report of a study.

    Attributes:
        markdown: Tables and sentences, without a title. A figure is shown by
            ``![what it shows](NAME.svg)``.
        figures: SVG texts by their names; each becomes NAME.svg.
    """

    markdown: str
    figures: Mapping[str, str] = field(default_factory=dict)


class Finished(NamedTuple):
    """A finished study: its report, the written files, and the errors of failed trials by key.

    If there are no results, there is no report.
    """

    report: Report | None
    files: tuple[Path, ...]
    failures: dict[str, str]


def run_study(
    study: Study,
    settings: Settings,
    *,
    out: Path,
    workers: int | None,
    ray: str | None = None,
    command: str = "",
    watch: Callable[[Progress], None] | None = None,
) -> Finished:
    """Run the missing trials of a study, and write its report.

    Args:
        study: The study.
        settings: The user's settings.
        out: Folder in which a folder with the study's name gets the results.
        workers: Number of parallel trials; see `Session`.
        ray: Address of the Ray cluster for the trials; ``local`` starts one; None uses processes.
        command: The command that repeats the study, for the report.
        watch: Called when a trial ends.

    Raises:
        MissingExtraError: Ray or matplotlib is not installed; raised before the first trial.
        SpecError: The settings are wrong.
    """
    if find_spec("matplotlib") is None:
        raise MissingExtraError("drawing figures", extra="reproduce")
    session = Session(Records(out, study.name), workers=workers, ray=ray, watch=watch)
    tried: set[str] = set()
    while new := [one for one in study.trials(settings, session.results) if one.key not in tried]:
        tried.update(trial.key for trial in new)
        missing = session.find(new)
        if not settings.only_report:
            session.run(missing)
    if not session.records:
        return Finished(None, (), session.failures)
    report, base = study.report(settings, session.results), out / study.name
    document = {
        "name": study.name,
        "title": study.title,
        "command": command,
        "version": fedone_sdk.__version__,
        "quick": settings.quick,
        "trials": {key: asdict(record) for key, record in session.records.items()},
        "failed": session.failures,
    }
    made = _made(command, [*session.records.values()], session.failures)
    warning = f"{declared()['quick']}\n\n" if settings.quick else ""
    written = {
        base / f"{study.name}.md": f"# {study.title}\n\n{warning}{report.markdown.rstrip()}{made}",
        base / f"{study.name}.json": json.dumps(document, indent=2, ensure_ascii=False) + "\n",
        **{base / f"{name}.svg": svg for name, svg in report.figures.items()},
    }
    for file, content in written.items():
        write_whole(file, content)
    return Finished(report, tuple(written), session.failures)


def _made(command: str, held: Sequence[Record], failures: Mapping[str, str]) -> str:
    """Return the section on how a report was made."""
    seeds = {one.options["seed"] for one in held if one.options.get("seed") is not None}
    models = {f"`{one.result['model']}`" for one in held if one.result.get("model")}
    seconds = math.fsum(one.wall_s for one in held)
    facts = {
        "Command": f"`{command}`" if command else "",
        "SDK": ", ".join(sorted({one.version for one in held})),
        "Model": ", ".join(sorted(models)),
        "Seeds": ", ".join(map(str, sorted(seeds))),
        "Trials": f"{len(held)}, one core each; {seconds:.0f} s one after another",
    }
    lines = [f"- {name}: {text}\n" for name, text in facts.items() if text]
    lines += [f"- Failed: `{key}`: {message}\n" for key, message in failures.items()]
    return f"\n\n## How this was made\n\n{''.join(lines)}"


class Study(ABC):
    """One run at every point of a grid, repeated over seeds.

    If a point has several learning rates, pilots with other seeds run first, and choose the rate of
    the repeats.

    Attributes:
        said: The study's entry in `studies.yaml`, which explains the keys.
    """

    def __init__(self, name: str) -> None:
        self.name, self.said = name, declared()["studies"][name]
        self.title: str = self.said["title"]
        self.default_seeds: int = self.said.get("seeds", 3)
        self.options: Sequence[str] = self.said.get("options", ())

    def text(self, name: str, /, **values: Any) -> str:
        """Return a text of the study's entry, with values filled in."""
        text: str = self.said["texts"][name]
        return text.format(**values)

    @abstractmethod
    def report(self, settings: Settings, results: Results) -> Report:
        """Return the report. Trials that failed are absent from `results`."""

    def run(self, settings: Settings) -> dict[str, Any]:
        """Return the settings that all runs share, with the user's numbers.

        Raises:
            SpecError: A number is not positive, or should be a whole number.
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
        """Return the seeds of a point; None if the result does not depend on a seed."""
        return range(settings.seeds)

    def key(self, point: Point) -> str:
        """Return the key of the trial of a point."""
        key: str = self.said["key"].format(**point)
        return key

    def trial(self, settings: Settings, key: str, point: Point) -> Trial:
        """Return the trial of a point: by default, a run with the point's attributes."""
        tuning = {name: value for name, value in point.items() if name != "rate"}
        return run_trial(key, settings, Tuning(**changed(self.run(settings), tuning)), run_tuning)

    def rates(self, settings: Settings, point: Point) -> Sequence[float]:
        """Return the learning rates that pilots compare; empty if there are no pilots."""
        return ()

    def pilot(self, settings: Settings, key: str, point: Point) -> Trial:
        """Return the trial of a pilot."""
        return self.trial(settings, key, point)

    def loss(self, settings: Settings, point: Point, pilots: Sequence[Result]) -> tuple[float, ...]:
        """Return the value that the best learning rate minimises; at a tie the first rate wins."""
        raise NotImplementedError

    def rate(self, settings: Settings, point: Point, results: Results) -> float | None:
        """Return the rate of a point: the best rate of its pilots; None without results."""
        losses = {}
        for rate in self.rates(settings, point):
            keys = [key for key, _ in self._pilots(point, rate)]
            if pilots := [results[key] for key in keys if key in results]:
                losses[rate] = self.loss(settings, point, pilots)
        return min(losses, key=lambda rate: losses[rate], default=None)

    def trials(self, settings: Settings, results: Results) -> Sequence[Trial]:
        """Return the trials that are known so far: the pilots, then one trial per seed and point.

        When these trials are done, the method is called again, until it returns no new trials. The
        order completes one row of the table after another.

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
        """Return the results along the last axis; `outer` has the values on the other axes."""
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
    """Return `base` with changes; nested mappings are changed key by key."""
    found = dict(base)
    for name, value in changes.items():
        held = found.get(name)
        both = isinstance(held, Mapping) and isinstance(value, Mapping)
        found[name] = {**(held or {}), **value} if both else value
    return found
