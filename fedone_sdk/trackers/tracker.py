"""What a tracker is, and how one is found by its name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Any, Protocol

from fedone_sdk.errors import MissingExtraError, SpecError
from fedone_sdk.messages import RoundReport, RunResult
from fedone_sdk.spec import RunSpec

__all__ = ["GROUP", "TrackedRun", "Tracker", "TrackerFactory", "find_tracker", "params_of"]

GROUP = "fedone.trackers"
"""The group of entry points that trackers are found in."""

_PACKAGES = {"mlflow": "mlflow", "tensorboard": "tensorboardX", "wandb": "wandb"}
"""What ours need; each has an extra of its name."""

_MOST_CHARS = 500
"""Of a parameter's text: the least that trackers take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """A run as a tracker is told of it.

    Attributes:
        run_id: The run.
        name: What people call it.
        params: Its description, flat: ``method.name`` and so on. No secret stands in it.
    """

    run_id: str
    name: str
    params: Mapping[str, str | int | float | bool] = field(default_factory=dict)


class Tracker(Protocol):
    """Told of one run. All calls come from one thread; what one raises ends the tracking only."""

    def round(self, report: RoundReport, queries: int) -> None:
        """A round is done.

        Args:
            report: The round; its metric is told apart.
            queries: Training queries spent by its end: the step of the curves.
        """
        ...

    def metric(self, name: str, value: float, queries: int) -> None:
        """The deployable prompt was measured on the dev split.

        Args:
            name: Which metric.
            value: What it is.
            queries: Training queries spent by the end of the round that it belongs to.
        """
        ...

    def end(self, result: RunResult | None) -> None:
        """The run is over; called once, and nothing after it.

        Args:
            result: How it ended; None where that is not known, as when it was broken off.
        """
        ...


TrackerFactory = Callable[[TrackedRun], Tracker]
"""Makes the tracker of a run: what an entry point of the group names."""


def find_tracker(name: str) -> TrackerFactory:
    """Loads a tracker by the name of its entry point.

    Raises:
        MissingExtraError: What it needs is not installed.
        SpecError: There is none of this name, or it cannot be loaded.
    """
    found = {point.name: point for point in entry_points(group=GROUP)}
    if name not in found:
        known = ", ".join(sorted(found)) or "none"
        raise SpecError(f"--tracker: {name!r} is not one of {known}", source="arguments")
    if name in _PACKAGES and find_spec(_PACKAGES[name]) is None:
        raise MissingExtraError(f"--tracker {name}", extra=name)
    try:
        factory: TrackerFactory = found[name].load()
    except Exception as exc:  # Somebody else's module can raise anything.
        reason = f"{type(exc).__name__}: {exc}"
        raise SpecError(
            f"--tracker: {name} cannot be loaded: {reason}", source="arguments"
        ) from exc
    return factory


def params_of(spec: RunSpec) -> dict[str, str | int | float | bool]:
    """A run's description, flat and short; what is null or empty is left out.

    >>> from fedone_sdk.glue import glue_task
    >>> spec = RunSpec.model_validate({"task": glue_task("sst2"), "prompt":
    ...     {"vocabulary": {"kind": "pmi"}}})
    >>> params_of(spec)["prompt.vocabulary.kind"]
    'pmi'
    """
    return dict(_flat("", spec.model_dump(mode="json", exclude={"name"})))


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, str | int | float | bool]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(f"{prefix}.{key}" if prefix else str(key), inner)
    elif isinstance(value, (int, float, bool)):
        yield prefix, value
    elif value:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        yield prefix, text if len(text) <= _MOST_CHARS else f"{text[: _MOST_CHARS - 3]}..."
