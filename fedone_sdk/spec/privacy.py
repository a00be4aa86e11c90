"""Differential privacy of updates: a run's noise, and a device's requirements."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedone_sdk.spec.base import Spec


class PrivacySpec(Spec):
    """Clipping and Gaussian noise on the device (docs/explanation/privacy.md).

    Attributes:
        mechanism: The mechanism; only Gaussian noise is supported.
        target: ``losses`` clips each example's loss and adds noise to each prompt's mean loss,
            which protects one example. ``alpha`` clips the step of alpha and adds noise to each
            entry, which protects all data of a device, and needs the ``alpha`` exchange.
        clip: ``losses``: maximum loss of one example. ``alpha``: maximum L2 norm of a step.
        noise_multiplier: Standard deviation of the noise, divided by the L2 sensitivity.
        delta: The delta of (epsilon, delta)-differential privacy.
        max_epsilon: A device that has spent this epsilon gets no more work; null only counts.
    """

    mechanism: Literal["gaussian"] = "gaussian"
    target: Literal["losses", "alpha"] = "losses"
    clip: Annotated[float, Field(gt=0, le=1e6)]
    noise_multiplier: Annotated[float, Field(ge=0.01, le=1e6)]
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    max_epsilon: Annotated[float, Field(gt=0, le=1e6)] | None = None


class RequiredPrivacy(Spec):
    """A device's requirements of the runs that it works for (docs/explanation/privacy.md).

    A run's clip needs no bound, because its noise is proportional to it.

    Attributes:
        max_epsilon: Maximum total epsilon of all work of the device. Work that would exceed it is
            declined.
        delta: The delta of (epsilon, delta)-differential privacy, independent of the run's delta.
        min_noise_multiplier: Work with less noise is declined, independent of `max_epsilon`; null
            accepts any noise.
        unit: Unit of privacy. ``label``: the label of one example; the server may see texts.
            ``example``: one whole example. ``device``: all data of the device, which only runs
            with target ``alpha`` protect.
    """

    max_epsilon: Annotated[float, Field(gt=0, le=1e6)]
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    min_noise_multiplier: Annotated[float, Field(gt=0, le=1e6)] | None = None
    unit: Literal["label", "example", "device"] = "example"
