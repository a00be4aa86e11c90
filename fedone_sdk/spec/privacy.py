"""How much noise devices add to what they return, as RUN.yaml says it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedone_sdk.spec.base import Spec

__all__ = ["PrivacySpec"]


class PrivacySpec(Spec):
    """Clipping and Gaussian noise on the device (docs/explanation/privacy.md).

    Attributes:
        mechanism: Gaussian noise is the only one.
        target: ``losses`` clips each example's loss and adds noise to each prompt's mean loss: it
            protects one example. ``alpha`` clips the whole step of alpha and adds noise to each
            entry: it protects all that a device holds, and needs the ``alpha`` exchange.
        clip: ``losses``: the largest loss of one example. ``alpha``: the largest L2 norm of a
            step.
        noise_multiplier: Standard deviation of the noise over the L2 sensitivity.
        delta: Of (epsilon, delta)-differential privacy.
        max_epsilon: A device that has spent so much gets no more work; null only counts.
    """

    mechanism: Literal["gaussian"] = "gaussian"
    target: Literal["losses", "alpha"] = "losses"
    clip: Annotated[float, Field(gt=0, le=1e6)]
    noise_multiplier: Annotated[float, Field(ge=0.01, le=1e6)]
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    max_epsilon: Annotated[float, Field(gt=0, le=1e6)] | None = None
