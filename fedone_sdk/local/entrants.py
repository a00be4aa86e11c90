"""Entrants of a comparison: methods with their settings, and baselines without tuning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from pydantic import ValidationError

from fedone_sdk.errors import ArgumentError, SpecError
from fedone_sdk.evaluation.results import BASELINES, Entrant
from fedone_sdk.spec import MethodSpec, RunSpec, validate_spec

_PEERS = ("random", "gs-bdpl")
"""Default opponents of RUN.yaml's own method."""

_MODELS: Mapping[str, Any] = {
    name: model
    for model in get_args(get_args(MethodSpec)[0])
    for name in get_args(model.model_fields["name"].annotation)
}

METHODS = tuple(_MODELS)
"""The black-box methods, by their names in RUN.yaml."""


def default_names(spec: RunSpec) -> tuple[str, ...]:
    """Return RUN.yaml's own method, its peers, and the baselines that the task allows."""
    names = [spec.method.name, *_PEERS, *BASELINES]
    if spec.against_bias():
        names.remove("no-prompt-bias")
    return tuple(dict.fromkeys(names))


def entrants_of(document: Mapping[str, Any], base: RunSpec, names: Sequence[str]) -> list[Entrant]:
    """Return one entrant per method or baseline.

    A method takes the settings of RUN.yaml's method that it has in common. If ``calibration`` is
    not valid with it, the SDK's default is used, and noted.
    """
    if not names or len(set(names)) < len(names):
        raise ArgumentError("--methods: each name may occur only once")
    return [_entrant(document, base, name) for name in names]


def _entrant(document: Mapping[str, Any], base: RunSpec, name: str) -> Entrant:
    if name in BASELINES:
        if name == "no-prompt-bias" and (problem := base.against_bias()):
            raise ArgumentError(f"--methods: {name} {problem}")
        return Entrant(name=name, kind="baseline", spec=base)
    if name not in METHODS:
        known = ", ".join((*METHODS, *BASELINES))
        raise ArgumentError(f"--methods: {name!r} is not known; allowed: {known}")
    if name == base.method.name:
        return Entrant(name=name, kind="method", spec=base)
    changed = {
        **document,
        "method": _settings(document.get("method") or {}, name),
        "seed": base.seed,
        "budget": base.budget and base.budget.model_dump(),
    }
    spec = _valid(changed, name)
    notes = (
        note
        for note in base.differences(spec)
        if note.split(" ")[0].partition(".")[0] not in ("method", "seed")
    )
    return Entrant(name=name, kind="method", spec=spec, notes=tuple(notes))


def _settings(own: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the settings that another method shares with RUN.yaml's, if their values are valid."""
    model = _MODELS[name]
    kept = {key: own[key] for key in model.model_fields.keys() & own.keys() if key != "name"}
    try:
        model.model_validate({**kept, "name": name})
    except ValidationError as exc:
        wrong = {error["loc"][0] for error in exc.errors() if error["loc"]}
        kept = {key: value for key, value in kept.items() if key not in wrong}
    return {**kept, "name": name}


def _valid(document: Mapping[str, Any], name: str) -> RunSpec:
    """Return the run, with the default ``calibration`` if only that makes it valid."""
    first: SpecError | None = None
    without = {key: value for key, value in document.items() if key != "calibration"}
    for form in (document, without):
        try:
            return validate_spec(RunSpec, form, source="arguments")
        except SpecError as exc:
            first = first or exc
    problem = "; ".join(first.problems if first else ())
    raise ArgumentError(f"--methods: {name} cannot run RUN.yaml ({problem}); leave it out")
