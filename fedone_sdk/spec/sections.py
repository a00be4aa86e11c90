"""Sections of RUN.yaml, except backend, prompt and method; and a device's required privacy."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from fedone_sdk.spec.base import Spec
from fedone_sdk.spec.methods import Exchange

_Count = Annotated[int, Field(ge=1, le=10**9)]
_Positive = Annotated[float, Field(gt=0, le=1e6)]


class DataSpec(Spec):
    """Source of examples, and their partition over clients.

    Attributes:
        train: Training file, or ``hf:NAME``. A served run needs one only if a vocabulary is
            counted from it, because clients bring their own rows.
        dev: Held-out file, or ``hf:NAME``; used only by evaluation.
        num_clients: K.
        shots: Examples per class and client; null uses all of them.
        dirichlet: Label proportions differ between clients: Dirichlet(this); a small number is
            uneven. Null gives clients the same distribution.
    """

    train: str | None = None
    dev: str | None = None
    num_clients: Annotated[int, Field(ge=1, le=1_000_000)] = 100
    shots: Annotated[int, Field(ge=1, le=100_000)] | None = None
    dirichlet: _Positive | None = None


class ParticipationSpec(Spec):
    """Selection, work and aggregation of clients.

    Attributes:
        clients_per_round: K*; 1 is the paper's query-optimal choice, more is FedAvg.
        exchange: Contents of assignments and updates: ``losses``, that of searches and of your
            own method, or ``alpha``, the default of the paper's methods.
        selection: ``uniform`` without replacement, or ``proportional`` to examples held, with
            replacement (the paper's proof).
        aggregation: Mean of the clients' alpha, ``plain`` (the paper's Algorithm 1) or weighted by
            ``examples`` (its code).
        min_clients: Enrolled clients that are required to start the first round.
        deadline_s: Seconds until a client without a message loses its seat.
        own_models: Who pays for devices that query a model of their own: ``charged``, each update
            costs its whole lease; ``trusted``, what the device reports. Null is ``charged`` without
            a gateway, and refuses such devices where there is one.
        model: Fingerprint of the required model; a device with another one declines. Null is the
            gateway's; a run without a gateway must name it.
    """

    clients_per_round: Annotated[int, Field(ge=1, le=10_000)] = 1
    exchange: Exchange = "losses"
    selection: Literal["uniform", "proportional"] = "uniform"
    aggregation: Literal["examples", "plain"] = "plain"
    min_clients: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    deadline_s: Annotated[float, Field(gt=0, le=86_400)] = 120.0
    own_models: Literal["charged", "trusted"] | None = None
    model: Annotated[str, Field(min_length=1, max_length=300)] | None = None


class EvaluationSpec(Spec):
    """Measurement of the deployable prompt on the dev split.

    Attributes:
        every: Rounds between points of the curve; 0 measures only before and after the run.
        examples: Dev examples per point of the curve; the first and last measurement use the whole
            split.
    """

    every: Annotated[int, Field(ge=0)] = 10
    examples: _Count = 256


class CalibrationSpec(Spec):
    """Correction of label bias (docs/explanation/calibration.md); may be written as its kind.

    Attributes:
        kind: ``auto`` is ``labels`` if the run supports it, else ``none``. ``labels``: updates have
            the derivatives of the losses over the label bias, at no further query, and the method
            fits a bias for each prompt; it needs a method with a pool of prompts and a
            cross-entropy over label words.
    """

    kind: Literal["auto", "none", "labels"] = "auto"

    @model_validator(mode="before")
    @classmethod
    def _kind_for_short(cls, value: object) -> Any:
        return {"kind": value} if isinstance(value, str) else value


class DefenceSpec(Spec):
    """Defences against Byzantine clients (docs/explanation/defences.md); or ``standard``.

    Attributes:
        kind: ``none``, or ``standard`` for devices that are not yours: long steps of alpha are
            scaled down, and updates that disagree are rejected.
        loss_clip: G: mean losses are clipped to [0, G], by the server in the ``losses`` exchange
            and by the client in the ``alpha`` exchange. Standard is 20; null for losses that may
            legitimately be larger, such as ``nll`` of long texts.
        outliers: Threshold of disagreement, in robust standard deviations, from which an update is
            rejected. Standard is 3; null rejects none, for clients with opposite data.
    """

    trust_region: ClassVar[float] = 1.5
    """Maximum step of alpha, in medians of the run's last steps: honest steps hardly exceed it."""

    widest_region: ClassVar[float] = 10.0
    """The same without a defence, for methods whose steps are not bounded otherwise (SGD)."""

    quarantine: ClassVar[int] = 2
    """A client gets no more work if at least this many of its updates, and more than half of them,
    were rejected: one may be bad luck."""

    kind: Literal["none", "standard"] = "none"
    loss_clip: _Positive | None = None
    outliers: Annotated[float, Field(ge=1, le=1e6)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, value: object) -> object:
        if isinstance(value, str):
            value = {"kind": value}
        if isinstance(value, dict) and value.get("kind") == "standard":
            return {"loss_clip": 20.0, "outliers": 3.0, **value}
        return value

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kind == "none" and self.outliers is not None:
            raise ValueError("outliers: needs kind standard")
        return self

    @property
    def judges(self) -> bool:
        """Whether updates are checked beyond the clipping of losses."""
        return self.kind == "standard"


class PrivacySpec(Spec):
    """Clipping and Gaussian noise on the device (docs/explanation/privacy.md).

    The bounds keep the noise between a tenth of the sensitivity and what a message can carry.

    Attributes:
        target: ``losses`` clips each example's loss and adds noise to each prompt's mean loss,
            which protects one example. ``alpha`` clips the step of alpha and adds noise to each
            entry, which protects all data of a device, and needs the ``alpha`` exchange.
        clip: ``losses``: maximum loss of one example. ``alpha``: maximum L2 norm of a step.
        noise_multiplier: Standard deviation of the noise, divided by the L2 sensitivity.
        delta: The delta of (epsilon, delta)-differential privacy.
        max_epsilon: A device that has spent this epsilon gets no more work; null only counts.
    """

    target: Literal["losses", "alpha"] = "losses"
    clip: Annotated[float, Field(ge=1e-3, le=1e3)]
    noise_multiplier: Annotated[float, Field(ge=0.1, le=1e3)]
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    max_epsilon: _Positive | None = None


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

    max_epsilon: _Positive
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    min_noise_multiplier: _Positive | None = None
    unit: Literal["label", "example", "device"] = "example"
