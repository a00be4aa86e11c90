"""The methods of the bench of queries, with all their settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fedone_sdk.errors import SpecError
from fedone_sdk.experiments.settings import Settings
from tests.benchmarks.queries.variants import Variant

__all__ = [
    "BARS",
    "BILLED_BARS",
    "CONTESTANTS",
    "Contestant",
    "DEFAULT",
    "STANDALONE",
    "can_be_attacked",
    "chosen_methods",
    "takes_part",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """A method with its settings.

    Attributes:
        label: Display name.
        method: As in a run.
        participation: As in a run, except K*.
        prompt_len: n.
        blank: Whether one of the candidates is blank.
        calibration: As in a run.
        defence: As in a run.
        ours: Whether the method is this SDK's, not the paper's.
        queries: Its own cap, if higher than that of the bench.
    """

    label: str
    method: Mapping[str, Any]
    participation: Mapping[str, Any] = field(default_factory=dict)
    prompt_len: int = 20
    blank: bool = False
    calibration: Literal["none", "labels"] = "none"
    defence: Literal["none", "standard"] = "none"
    ours: bool = False
    queries: int | None = None


_PAPER: Mapping[str, Any] = {
    "num_samples": 20,
    "batch_size": 32,
    "learning_rate": 3e-4,
    "optimizer": "adamw",
}

_SERVER_STATE: Mapping[str, Any] = {
    # Clients return only the gradient: a step this small stays above alpha's floor, and the
    # server's AdamW normalises its size.
    "method": {"num_samples": 20, "batch_size": 32, "optimizer": "sgd", "learning_rate": 1e-5},
    "participation": {"exchange": "alpha", "server_optimizer": "adamw"},
}
_OURS: Mapping[str, Any] = {"num_samples": 10, "batch_size": 32}

_POOL: Mapping[str, Any] = {
    "participation": {"exchange": "losses"},
    "prompt_len": 8,
    "blank": True,
    "ours": True,
}


def _pool(name: str, label: str) -> dict[str, Contestant]:
    """Return a method of this SDK with calibration, and without."""
    plain = Contestant(label=label, method={"name": name, **_OURS}, **_POOL)
    calibrated = replace(plain, label=f"{label}, calibrated", calibration="labels")
    return {name: calibrated, f"{name}-plain": plain}


_THOMPSON = _pool("thompson", "Thompson sampling")

DEFAULT = "default"
"""The default of a new run: the contestant that the bench's goals are about."""

CONTESTANTS: Mapping[str, Contestant] = {
    "gs-bdpl-paper": Contestant(
        label="GS-BDPL, the paper's settings", method={"name": "gs-bdpl", "tau": 0.1, **_PAPER}
    ),
    "gs-bdpl-best": Contestant(
        label="GS-BDPL at its best",
        method={"name": "gs-bdpl", "tau": 0.5, **_SERVER_STATE["method"]},
        participation={**_SERVER_STATE["participation"], "server_learning_rate": 1e-2},
        prompt_len=4,
    ),
    "bdpl-paper": Contestant(label="BDPL, the paper's settings", method={"name": "bdpl", **_PAPER}),
    "bdpl-best": Contestant(
        label="BDPL at its best",
        method={"name": "bdpl", **_SERVER_STATE["method"]},
        participation={**_SERVER_STATE["participation"], "server_learning_rate": 2e-3},
        prompt_len=4,
    ),
    "random": Contestant(
        label="Random search, leaders re-evaluated",
        method={"name": "random", **_OURS},
        participation={"exchange": "losses"},
        prompt_len=4,
    ),
    "random-best": Contestant(
        label="Random search at its best (blank, calibrated)",
        method={"name": "random", **_OURS},
        participation={"exchange": "losses"},
        blank=True,
        calibration="labels",
        prompt_len=8,
    ),
    **_pool("evolution", "Evolution"),
    **_THOMPSON,
    DEFAULT: replace(
        _THOMPSON["thompson"], label="Thompson sampling, calibrated, 500 queries", queries=500
    ),
}
"""By name. Settings "at its best" were chosen on pilots: docs/benchmarks/queries.md."""

BARS: Mapping[str, float] = {
    "gs-bdpl-paper": 20.0,
    "gs-bdpl-best": 5.0,
    "random": 5.0,
    "random-best": 5.0,
}
"""Methods whose final loss is a target, and the factor of queries that the default must save."""

BILLED_BARS: Mapping[str, float] = {"gs-bdpl-paper": 50.0}
"""The same for billed requests, where there is a goal."""

STANDALONE = ("no-prompt", "no-prompt-calibrated", "oracle")
"""Baselines without tuning: no prompt, with a fitted label bias, and the result of a long search on
all clients' rows."""


def chosen_methods(settings: Settings) -> tuple[list[str], bool]:
    """Return the selected methods, in the order given.

    Returns:
        The names, and whether the user named them.

    Raises:
        SpecError: There is no method of such a name.
    """
    asked = settings.options.get("methods")
    if asked is None:
        if settings.quick:
            return ["no-prompt", "no-prompt-calibrated", "gs-bdpl-paper", DEFAULT, "oracle"], False
        return [*STANDALONE[:2], *CONTESTANTS, STANDALONE[2]], False
    known = [*STANDALONE, *CONTESTANTS]
    for name in asked.split(","):
        if name not in known:
            raise SpecError(
                f"--set methods: there is no {name!r}; {', '.join(known)}", source="arguments"
            )
    return list(dict.fromkeys(asked.split(","))), True


def can_be_attacked(contestant: Contestant) -> bool:
    """Whether a method can be attacked: attacks need the losses exchange."""
    return contestant.participation.get("exchange") == "losses"


def takes_part(name: str, variant: Variant) -> bool:
    """Whether a method is run on a variant by default."""
    if variant.for_whom == "all":
        return True
    if name not in CONTESTANTS:
        return False
    return name == DEFAULT if variant.for_whom == "default" else CONTESTANTS[name].ours
