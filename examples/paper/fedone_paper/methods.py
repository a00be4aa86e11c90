"""The methods that are compared: one description for all tables and figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib.util import find_spec
from typing import Any, Literal

from fedone_paper.federated import Tuning, run_trial, run_tuning
from fedone_paper.fine_tuned import run_fine_tuning
from fedone_paper.settings import Settings, declared
from fedone_paper.soft_trials import SOFT, soft_trial
from fedone_paper.standalone import run_standing
from fedone_sdk.errors import ArgumentError
from fedone_sdk.evaluation.engine import Trial

_TUNING = {each.name for each in fields(Tuning)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A method with its settings, in a federation or without one.

    Attributes:
        name: Name in keys and JSON.
        title: Name in tables; a federated method has FedOne or FedAvg before it.
        paper: The method's row in `paper.yaml`; None: the row `name`; empty: no row.
        seeded: Whether its result depends on the seed. If not, it is run once.
        kind: The library that must run the model; None for any.
        usual: Whether it is run by default.
        standing: How the prompt is measured if it is not tuned in a federation.
        method: The ``method`` of the run, without the learning rate.
        rates: The learning rates to compare; empty for methods without a learning rate.
        samples: Whether the method draws prompts.
        slots: The slots of its prompts; empty if prompts have positions.
        gains: Targets at which a run ends (see `Probing`). The figure shows the first target.
        cap: Training queries after which such a run is censored; whole rounds for every K*.
    """

    name: str
    title: str
    paper: str | None = None
    seeded: bool = True
    kind: Literal["onnx", "transformers"] | None = None
    usual: bool = True
    standing: str | None = None
    method: Mapping[str, Any] = field(default_factory=dict)
    rates: Sequence[float] = ()
    samples: bool = True
    slots: Sequence[Mapping[str, Any]] = ()
    gains: Mapping[str, float] = field(default_factory=dict)
    cap: int = 2400

    @property
    def soft(self) -> bool:
        """Whether the method tunes a soft prompt."""
        return self.method.get("name") in SOFT

    def tuning(self, **attributes: Any) -> Tuning:
        """Return a run of the method; `attributes` are attributes of `Tuning`."""
        own = {"backend_kind": self.kind, "slots": self.slots}
        return Tuning(**{**attributes, **own})

    def trial(
        self, key: str, settings: Settings, run: Mapping[str, Any], rate: float | None = None
    ) -> Trial:
        """Return the trial of one run at a learning rate.

        `run` has attributes of `Tuning` without the method, ``batch_size`` and ``num_samples`` of
        the method, and ``searches``: whether learning rates are searched.
        """
        method = {"batch_size": run["batch_size"], **self.method}
        if self.samples:
            method.setdefault("num_samples", run["num_samples"])
        if rate is not None:
            method["learning_rate"] = rate
        attributes = {name: run[name] for name in _TUNING & run.keys()}
        tuning = self.tuning(**attributes, method=method)
        if self.soft:
            return soft_trial(key, settings, tuning)
        if self.standing is None:
            return run_trial(key, settings, tuning, run_tuning)
        if self.standing == "fine-tuning":
            searches = run["searches"]
            rates = declared()["full_rates"][: None if searches else 1]
            epochs = 20 if searches else 1
            return run_trial(key, settings, tuning, run_fine_tuning, rates=rates, max_epochs=epochs)
        prompt = declared()["manual_prompts"][tuning.task] if self.standing == "manual" else ""
        return run_trial(key, settings, tuning, run_standing, standing=self.standing, prompt=prompt)


def missing(row: Method, settings: Settings) -> str | None:
    """Return why a method cannot run on this machine with this model; None if it can."""
    if row.kind != "transformers":
        return None
    if not settings.has_weights:
        return "the model's folder has no config.json and weights for the transformers library"
    if settings.only_report:
        return None
    installed = all(map(find_spec, ("torch", "transformers")))
    return None if installed else "the extra torch is not installed"


def wanted(settings: Settings, known: Iterable[str]) -> tuple[str, ...] | None:
    """Return the methods in ``--set methods``; None if the option is not given.

    Raises:
        SpecError: A method is not known.
    """
    if "methods" not in settings.options:
        return None
    names, known = settings.options["methods"].split(","), list(known)
    if unknown := [name for name in names if name not in known]:
        raise ArgumentError(f"--set methods: there is no {', '.join(unknown)}; {', '.join(known)}")
    return tuple(dict.fromkeys(names))


def method_of(study: str, name: str) -> Method:
    """Return a study's variant of a method, or else the method with this name."""
    variant = dict(declared()["variants"].get(study, {}).get(name, {}))
    if not variant:
        return METHODS[name]
    base = METHODS[variant.pop("of")]
    method = {**base.method, **variant.pop("method", {})}
    fields = {"paper": "", "rates": (), **variant, "method": method, "name": name}
    return replace(base, **fields)


METHODS: Mapping[str, Method] = {
    name: Method(name=name, **said) for name, said in declared()["methods"].items()
}
"""All methods by name; methods without a federation come first."""
