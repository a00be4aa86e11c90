"""The methods that are compared: one description for all tables and figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from importlib.util import find_spec
from typing import Any, Literal

from fedone_paper.federated import Tuning, run_trial, tuning_trial
from fedone_paper.fine_tuned import run_fine_tuning
from fedone_paper.settings import Settings
from fedone_paper.soft_trials import SOFT, soft_trial
from fedone_paper.standalone import (
    MANUAL_PROMPTS,
    demonstrations_trial,
    prompt_trial,
    run_untrained,
)
from fedone_sdk.errors import ArgumentError
from fedone_sdk.evaluation.engine import Trial

RATES = (3e-4, 1e-4, 3e-5, 1e-5)
"""The learning rates that the paper searches."""

SOFT_RATES = (1e-1, 3e-2, 1e-2, 3e-3)
"""Of soft prompts, which need larger steps than distributions over tokens."""

FULL_RATES = (3e-4, 5e-5)
"""Of all weights."""

_TUNING = {each.name for each in fields(Tuning)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A method with its settings, in a federation or without one.

    Attributes:
        name: In keys and JSON.
        title: In tables; FedOne or FedAvg precedes that of a federated one.
        paper: The paper's row in `paper.yaml`; None is that of its name, an empty one is none.
        access: What it needs of the model.
        seeded: Whether its result depends on the seed; else it is run once.
        kind: Who must run the model; None takes any.
        packages: Packages that it needs in addition to the model's own.
        usual: Whether it is run by default.
        standing: Makes the trial of (key, settings, run, whether rates are searched) if it has no
            federation.
        method: The ``method`` of the run, without the learning rate.
        rates: The learning rates to be searched; empty for methods without one.
        samples: Whether the method draws prompts.
        slots: The slots of its prompts; empty for positions.
        gains: The targets of a run that ends at them, see `Probing`; the first one is the figure's.
        cap: Training queries at which such a run is censored; whole rounds of every K*.
    """

    name: str
    title: str
    paper: str | None = None
    access: Literal["black box", "white box"] = "black box"
    seeded: bool = True
    kind: Literal["onnx", "transformers"] | None = None
    packages: tuple[str, ...] = ()
    usual: bool = True
    standing: Callable[[str, Settings, Tuning, bool], Trial] | None = None
    method: Mapping[str, Any] = field(default_factory=dict)
    rates: tuple[float, ...] = ()
    samples: bool = True
    slots: tuple[Mapping[str, Any], ...] = ()
    gains: Mapping[str, float] = field(default_factory=dict)
    cap: int = 2400

    @property
    def soft(self) -> bool:
        """Whether it tunes a soft prompt."""
        return self.method.get("name") in SOFT

    @property
    def federated(self) -> bool:
        """Whether it is a method of a federation."""
        return self.standing is None

    def variant(self, title: str, *, changes: Mapping[str, Any], **fields: Any) -> Method:
        """Return the method with other settings and attributes, by default no row of the paper."""
        method = {**self.method, **changes}
        return replace(
            self, **{"title": title, "paper": "", "rates": (), **fields, "method": method}
        )

    def tuning(self, **attributes: Any) -> Tuning:
        """Return a run of it; `attributes` are those of `Tuning`."""
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
        if self.standing is not None:
            return self.standing(key, settings, tuning, run["searches"])
        return (
            soft_trial(key, settings, tuning) if self.soft else tuning_trial(key, settings, tuning)
        )


def missing(row: Method, settings: Settings) -> str | None:
    """Why a method cannot run on this machine with this model; None if it can."""
    if row.kind == "transformers":
        if not settings.has_weights:
            return "the model's folder has no config.json and weights for the transformers library"
        if any(find_spec(name) is None for name in ("torch", "transformers")):
            return "the extra torch is not installed"
    absent = [name for name in row.packages if find_spec(name) is None]
    return f"{', '.join(absent)} is not installed" if absent else None


def wanted(settings: Settings, known: Iterable[str]) -> tuple[str, ...] | None:
    """Return the names in ``--set methods``; None if the user names none.

    Raises:
        SpecError: One is not known.
    """
    if "methods" not in settings.options:
        return None
    names, known = settings.options["methods"].split(","), list(known)
    if unknown := [name for name in names if name not in known]:
        raise ArgumentError(f"--set methods: there is no {', '.join(unknown)}; {', '.join(known)}")
    return tuple(dict.fromkeys(names))


_BBT: dict[str, Any] = {"kind": "transformers", "packages": ("cmaes",)}
_TRAINED: dict[str, Any] = {
    **{"kind": "transformers", "access": "white box"},
    **{"rates": SOFT_RATES, "samples": False},
}
_GS_BDPL = {"name": "gs-bdpl"}

_METHODS = (
    Method(
        name="no-prompt",
        title="No prompt",
        standing=lambda key, settings, run, _: prompt_trial(key, settings, run.task, ""),
        seeded=False,
    ),
    Method(
        name="manual",
        title="Manual prompt",
        standing=lambda key, settings, run, _: prompt_trial(
            key, settings, run.task, MANUAL_PROMPTS[run.task]
        ),
        seeded=False,
    ),
    Method(
        name="in-context",
        title="In-context learning",
        standing=lambda key, settings, run, _: demonstrations_trial(
            key, settings, run.task, run.seed
        ),
    ),
    Method(
        name="untrained",
        title="Prompt without training",
        standing=lambda key, settings, run, _: run_trial(key, settings, run, run_untrained),
        method=_GS_BDPL,
    ),
    Method(
        name="fine-tuning",
        title="Fine-tuning",
        access="white box",
        kind="transformers",
        standing=lambda key, settings, run, searches: run_trial(
            key,
            settings,
            run,
            run_fine_tuning,
            rates=list(FULL_RATES if searches else FULL_RATES[:1]),
            max_epochs=20 if searches else 1,
        ),
        method=_GS_BDPL,
        samples=False,
    ),
    Method(
        name="prompt-tuning",
        title="Prompt tuning",
        method={"name": "prompt-tuning"},
        **_TRAINED,
    ),
    Method(
        name="p-tuning-v2",
        title="P-tuning v2",
        method={"name": "p-tuning-v2"},
        **_TRAINED,
    ),
    Method(name="bbt", title="BBT", method={"name": "bbt"}, **_BBT),
    Method(
        name="bbt-200",
        title="BBT (population 200)",
        paper="bbt",
        usual=False,
        method={"name": "bbt", "num_samples": 200},
        **_BBT,
    ),
    Method(name="bdpl", title="BDPL", method={"name": "bdpl"}, rates=RATES),
    Method(name="gs-bdpl", title="GS-BDPL", method=_GS_BDPL, rates=RATES),
    Method(
        name="default",
        title="The SDK's default: instructions, label bias",
        paper="",
        usual=False,
        method={"name": "thompson"},
        slots=({"name": "instruction", "candidates": "instructions"},),
    ),
)
METHODS: Mapping[str, Method] = {row.name: row for row in _METHODS}
"""By name: first those without a federation."""
