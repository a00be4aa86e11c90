"""Defences against Byzantine clients, in RUN.yaml."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from fedone_sdk.spec.base import Spec

_Positive = Annotated[float, Field(gt=0, le=1e6)]

_STANDARD: dict[str, Any] = {
    "loss_clip": 20.0,
    "trust_region": 1.5,
    "outliers": 3.0,
    "quarantine": 2,
}


class DefenceSpec(Spec):
    """Defences against Byzantine clients (docs/explanation/defences.md); or ``standard``.

    Attributes:
        kind: ``none``, or ``standard`` for devices that are not yours, with the standard values of
            keys that are not set. Null disables a single defence.
        loss_clip: G: mean losses are clipped to [0, G], by the server in the ``losses`` exchange
            and by the client in the ``alpha`` exchange. Standard is 20; null for losses that may
            legitimately be larger, such as ``nll`` of long texts.
        trust_region: Maximum step of alpha, in medians of the run's last steps; a longer one is
            scaled down. Standard is 1.5.
        outliers: Threshold of disagreement, in robust standard deviations, from which an update is
            rejected. Standard is 3.
        quarantine: A client gets no more work if at least this many of its updates, and more than
            half of them, were rejected. Standard is 2.
        max_influence: Maximum share of one client in the run's movement, once the run has 2 / share
            updates. Standard is no limit.
    """

    kind: Literal["none", "standard"] = "none"
    loss_clip: _Positive | None = None
    trust_region: Annotated[float, Field(ge=0.1, le=1e6)] | None = None
    outliers: Annotated[float, Field(ge=1, le=1e6)] | None = None
    quarantine: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    max_influence: Annotated[float, Field(gt=0, le=1)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, value: object) -> object:
        if isinstance(value, str):
            value = {"kind": value}
        if isinstance(value, dict) and value.get("kind") == "standard":
            return {**_STANDARD, **value}
        return value

    @model_validator(mode="after")
    def _check(self) -> DefenceSpec:
        if self.quarantine is not None and self.outliers is None:
            raise ValueError("quarantine: needs outliers, which it counts")
        return self

    @property
    def judges(self) -> bool:
        """Whether updates are checked beyond the clipping of losses."""
        return any(
            value is not None for value in (self.trust_region, self.outliers, self.max_influence)
        )
