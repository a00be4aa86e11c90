"""How much noise devices add to what they return: what a run asks for, what a device requires."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedone_sdk.spec.base import Spec

__all__ = ["PrivacySpec", "RequiredPrivacy"]


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


class RequiredPrivacy(Spec):
    """What a device requires of the runs that it works for (docs/explanation/privacy.md).

    A run's clip needs no bound: its noise is a multiple of it.

    Attributes:
        max_epsilon: What all work of the device together may give away. Work that would pass it is
            declined.
        delta: Of (epsilon, delta)-differential privacy; the run's own delta does not matter.
        min_noise_multiplier: Work with less noise is declined, however little of `max_epsilon` it
            takes; null takes any noise.
        unit: What is protected. ``label``: one example's label, the server may see texts.
            ``example``: one whole example. ``device``: all that the device holds, which only runs
            with target ``alpha`` protect.
    """

    max_epsilon: Annotated[float, Field(gt=0, le=1e6)]
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    min_noise_multiplier: Annotated[float, Field(gt=0, le=1e6)] | None = None
    unit: Literal["label", "example", "device"] = "example"
