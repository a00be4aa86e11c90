"""The methods that are compared: one description for all tables and figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Literal

from fedone_sdk.backends.fitting import read_json
from fedone_sdk.errors import SpecError
from fedone_sdk.experiments.experiment import Trial
from fedone_sdk.experiments.federated import Tuning, tuning_trial
from fedone_sdk.experiments.fine_tuned import fine_tuning_trial
from fedone_sdk.experiments.settings import Settings
from fedone_sdk.experiments.standalone import (
    MANUAL_PROMPTS,
    demonstrations_trial,
    prompt_trial,
    untrained_trial,
)

__all__ = [
    "FULL_RATES",
    "METHODS",
    "Method",
    "RATES",
    "SOFT_RATES",
    "Scale",
    "missing",
]

RATES = (3e-4, 1e-4, 3e-5, 1e-5)
"""The learning rates that the paper searches."""

SOFT_RATES = (1e-1, 3e-2, 1e-2, 3e-3)
"""Of soft prompts, which need larger steps than distributions over tokens."""

FULL_RATES = (3e-4, 5e-5)
"""Of all weights."""

Kind = Literal["onnx", "transformers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How large a table is run.

    Attributes:
        tasks: Its columns.
        num_clients: K.
        shots: Rows per class and client.
        prompt_len: n.
        vocab_size: N.
        num_samples: I.
        batch_size: B.
        rounds: T.
        clients_per_round: K*.
        every: Rounds between the points of the curves.
        searches: Whether learning rates are searched, else the first one is taken.
    """

    tasks: tuple[str, ...]
    num_clients: int = 100
    shots: int = 16
    prompt_len: int = 20
    vocab_size: int = 200
    num_samples: int = 20
    batch_size: int = 32
    rounds: int = 100
    clients_per_round: int = 1
    every: int = 10
    searches: bool = True

    def run(self, task: str, method: Mapping[str, Any], seed: int) -> dict[str, Any]:
        """The attributes of a `Tuning` of this size."""
        return {
            "task": task,
            "method": {"batch_size": self.batch_size, **method},
            "seed": seed,
            "num_clients": self.num_clients,
            "shots": self.shots,
            "prompt_len": self.prompt_len,
            "vocab_size": self.vocab_size,
            "rounds": self.rounds,
            "clients_per_round": self.clients_per_round,
            "every": self.every,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A method with its settings: of a federation, or standing on its own.

    Attributes:
        name: In keys and JSON.
        title: In the table; that of a federated one behind FedOne or FedAvg.
        paper: The paper's row in `paper.yaml`; None is that of its own name, an empty one is
            none.
        access: To the model.
        seeded: Whether its result depends on the seed; else it is run once.
        kind: Who must run the model; None takes any.
        packages: Packages that it needs in addition to the model's own.
        usual: Whether it is run by default.
        standing: Makes the trial of (key, settings, scale, task, seed) where it is not federated.
        method: The ``method`` of the run where it is, but for the learning rate.
        rates: The learning rates to be searched; none where the method has no such thing.
        samples: Whether the method draws prompts, so that `Scale.num_samples` is its.
        shape: Settings of the method that are the model's: ``hidden_size``, ``num_layers``.
        vocabulary: Whether its prompts are made of candidates.
    """

    name: str
    title: str
    paper: str | None = None
    access: Literal["black box", "white box"] = "black box"
    seeded: bool = True
    kind: Kind | None = None
    packages: tuple[str, ...] = ()
    usual: bool = True
    standing: Callable[[str, Settings, Scale, str, int], Trial] | None = None
    method: Mapping[str, Any] = field(default_factory=dict)
    rates: tuple[float, ...] = ()
    samples: bool = True
    shape: tuple[str, ...] = ()
    vocabulary: bool = True

    @property
    def federated(self) -> bool:
        """Whether it is a method of a federation."""
        return self.standing is None

    def tuning(self, **attributes: Any) -> Tuning:
        """A run of it; `attributes` are those of `Tuning`."""
        vocabulary = {} if self.vocabulary else {"vocab_size": None}
        return Tuning(**{**attributes, "backend_kind": self.kind, **vocabulary})

    def trial(
        self,
        key: str,
        settings: Settings,
        scale: Scale,
        task: str,
        seed: int,
        rate: float | None = None,
        **changes: Any,
    ) -> Trial:
        """The trial of one run; `changes` are attributes of `Tuning`."""
        if self.standing is not None:
            return self.standing(key, settings, scale, task, seed)
        shape = _shape(settings) if self.shape else {}
        method = {**self.method, **{name: shape[name] for name in self.shape}}
        if self.samples:
            method.setdefault("num_samples", scale.num_samples)
        if rate is not None:
            method["learning_rate"] = rate
        tuning = self.tuning(**{**scale.run(task, method, seed), **changes})
        return tuning_trial(key, settings, tuning)


def missing(row: Method, settings: Settings) -> str | None:
    """What a method lacks on this machine with this model; None where it is nothing."""
    if row.kind == "transformers":
        if not settings.has_weights:
            return "the model's folder has no config.json and weights for the transformers library"
        if any(find_spec(name) is None for name in ("torch", "transformers")):
            return "the extra torch is not installed"
    absent = [name for name in row.packages if find_spec(name) is None]
    return f"{', '.join(absent)} is not installed" if absent else None


def _shape(settings: Settings) -> dict[str, int]:
    config = read_json(settings.model_folder / "config.json")
    names = {"hidden_size": "hidden_size", "num_layers": "num_hidden_layers"}
    try:
        return {name: int(config[key]) for name, key in names.items()}
    except KeyError as exc:
        raise SpecError(f"--model: config.json has no {exc.args[0]}", source="arguments") from exc


_STANDING = (
    Method(
        name="no-prompt",
        title="No prompt",
        standing=lambda key, settings, scale, task, seed: prompt_trial(key, settings, task, ""),
        seeded=False,
    ),
    Method(
        name="manual",
        title="Manual prompt",
        standing=lambda key, settings, scale, task, seed: prompt_trial(
            key, settings, task, MANUAL_PROMPTS[task]
        ),
        seeded=False,
    ),
    Method(
        name="in-context",
        title="In-context learning",
        standing=lambda key, settings, scale, task, seed: demonstrations_trial(
            key, settings, task, seed
        ),
    ),
    Method(
        name="untrained",
        title="Prompt without training",
        standing=lambda key, settings, scale, task, seed: untrained_trial(
            key,
            settings,
            Tuning(**scale.run(task, {"name": "gs-bdpl", "num_samples": scale.num_samples}, seed)),
        ),
    ),
    Method(
        name="fine-tuning",
        title="Fine-tuning",
        access="white box",
        kind="transformers",
        standing=lambda key, settings, scale, task, seed: fine_tuning_trial(
            key,
            settings,
            Tuning(**scale.run(task, {"name": "gs-bdpl"}, seed)),
            rates=FULL_RATES if scale.searches else FULL_RATES[:1],
            max_epochs=20 if scale.searches else 1,
        ),
    ),
)
_BBT: dict[str, Any] = {
    "method": {"name": "bbt"},
    "kind": "transformers",
    "packages": ("cmaes",),
    "vocabulary": False,
}
_TRAINED: dict[str, Any] = {
    "access": "white box",
    "kind": "transformers",
    "rates": SOFT_RATES,
    "samples": False,
    "vocabulary": False,
}

_FEDERATED = (
    Method(
        name="prompt-tuning",
        title="Prompt tuning",
        method={"name": "prompt-tuning"},
        shape=("hidden_size",),
        **_TRAINED,
    ),
    Method(
        name="p-tuning-v2",
        title="P-tuning v2",
        method={"name": "p-tuning-v2"},
        shape=("hidden_size", "num_layers"),
        **_TRAINED,
    ),
    Method(name="bbt", title="BBT", **_BBT),
    Method(
        name="bbt-200",
        title="BBT (population 200)",
        paper="bbt",
        usual=False,
        **{**_BBT, "method": {"name": "bbt", "num_samples": 200}},
    ),
    Method(name="bdpl", title="BDPL", method={"name": "bdpl"}, rates=RATES),
    Method(name="gs-bdpl", title="GS-BDPL", method={"name": "gs-bdpl"}, rates=RATES),
)
METHODS: Mapping[str, Method] = {row.name: row for row in (*_STANDING, *_FEDERATED)}
"""By name: what needs no federation, then what has one."""
