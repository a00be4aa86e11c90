"""Sections of RUN.yaml, except backend and prompt; and a device's required privacy."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

import pydantic
from pydantic import BeforeValidator, Field, JsonValue, model_validator

from fedone_sdk.spec.base import Spec

_Count = Annotated[int, Field(ge=1, le=10**9)]
_Positive = Annotated[float, Field(gt=0, le=1e6)]


class DataSpec(Spec):
    """Source of examples, and their partition over clients.

    Attributes:
        train: Training file, or ``hf:NAME``. The clients of a served run have their own rows; such
            a run needs the file only for a vocabulary of kind ``pmi`` (frequent words of a text).
        dev: Held-out file, or ``hf:NAME``; used only by evaluation.
        num_clients: K, the number of clients.
        shots: Examples per class and client; null uses all examples.
        dirichlet: Concentration of the Dirichlet distribution of each client's label proportions; a
            small number gives uneven proportions. Null gives all clients the same proportions.
    """

    train: str | None = None
    dev: str | None = None
    num_clients: Annotated[int, Field(ge=1, le=1_000_000)] = 100
    shots: Annotated[int, Field(ge=1, le=100_000)] | None = None
    dirichlet: _Positive | None = None


Exchange = Literal["alpha", "losses"]
"""What assignments and updates contain: alpha, the parameters of the distribution over prompts; or
prompts and their losses."""

NumSamples = Annotated[int, Field(ge=2, le=65536, description="I, prompts per local step.")]
LocalSteps = Annotated[int, Field(ge=1, le=1024, description="E, local steps.")]
BatchSize = Annotated[int, Field(ge=1, le=1024, description="B, examples per mini-batch.")]


class _MethodSpec(Spec):
    pools: ClassVar[bool] = False
    """Whether the method keeps a pool of whole prompts and scores them repeatedly (`SEARCHES`)."""

    exchange: ClassVar[Exchange] = "alpha"

    num_samples: NumSamples = 20
    local_steps: LocalSteps = 1
    batch_size: BatchSize = 32

    @property
    def label(self) -> str:
        """The method's name in reports."""
        return str(getattr(self, "name", ""))

    @property
    def keeps_client_state(self) -> bool:
        """Whether the method has a state per client, which is kept between rounds."""
        return False


class GradientSpec(_MethodSpec):
    """The paper's methods: gradient descent on alpha, the parameters of a distribution of prompts.

    Attributes:
        name: ``gs-bdpl`` is Gumbel-Softmax black-box discrete prompt learning; ``bdpl`` is the
            earlier method, in which alpha has the candidates' probabilities (Diao et al. 2022).
        tau: Gumbel-Softmax temperature; ``gs-bdpl`` only, 0.1 by default.
        optimizer: Optimiser of the local step; the state of AdamW is kept per client.
        learning_rate: Learning rate of the local step.
        alpha_min: Minimum of every entry of alpha.
    """

    name: Literal["gs-bdpl", "bdpl"] = "gs-bdpl"
    tau: Annotated[float, Field(gt=0, le=100)] | None = Field(default=None, validate_default=True)
    optimizer: Literal["sgd", "adamw"] = "adamw"
    learning_rate: Annotated[float, Field(gt=0, le=1e6)] = 3e-4
    alpha_min: Annotated[float, Field(gt=0, le=1)] = 1e-5

    @pydantic.field_validator("tau")
    @classmethod
    def _check_tau(cls, tau: float | None, info: pydantic.ValidationInfo) -> float | None:
        if info.data.get("name") != "bdpl":
            return 0.1 if tau is None else tau
        if tau is not None:
            raise ValueError("is not a key of bdpl")
        return None

    @property
    def keeps_client_state(self) -> bool:
        """Whether the optimiser is AdamW, whose moments are stored."""
        return self.optimizer == "adamw"


class SearchSpec(_MethodSpec):
    """Searches over whole prompts. At the end, successive halving chooses among the best prompts.

    Attributes:
        name: ``thompson`` is Thompson sampling on a Gaussian process, which learns about a prompt
            from others with the same candidates; ``random`` tries random prompts; ``tpe`` is
            Optuna's Tree-structured Parzen Estimator (extra `optuna`).
        halving: Fraction of the run for successive halving. With 0, ``tpe`` deploys the prompt with
            the lowest mean loss, and other methods deploy the prompt with the best estimate.
    """

    pools: ClassVar[bool] = True
    exchange: ClassVar[Exchange] = "losses"

    name: Literal["thompson", "random", "tpe"] = "thompson"
    num_samples: NumSamples = 5
    batch_size: BatchSize = 16
    halving: Annotated[float, Field(ge=0, lt=1)] = 0.2


class OwnMethodSpec(_MethodSpec):
    """Your own `Algorithm`, which runs on the server. Devices get neither `object` nor `options`.

    Attributes:
        object: The class or function that makes the method: ``package.module:object`` (the module
            may be next to the file), or the name of an entry point of ``fedone.methods``.
        options: Further keyword arguments of `object`.
    """

    exchange: ClassVar[Exchange] = "losses"

    name: Literal["own"]
    object: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    options: dict[str, JsonValue] = Field(default_factory=dict)

    @property
    def label(self) -> str:
        """The object's name."""
        return self.object or self.name

    def for_devices(self) -> OwnMethodSpec:
        """Return the method without `object` and `options`."""
        return self.model_copy(update={"object": None, "options": {}})


SEARCHES = "method thompson, random or tpe"

MethodSpec = Annotated[
    Annotated[GradientSpec | SearchSpec | OwnMethodSpec, Field(discriminator="name")],
    BeforeValidator(lambda value: {"name": value} if isinstance(value, str) else value),
]


class ParticipationSpec(Spec):
    """How clients are selected, and how their work is exchanged and aggregated.

    Attributes:
        clients_per_round: K*. With 1, a run needs the fewest queries by the paper's analysis; with
            more, the server averages their updates (FedAvg).
        exchange: What assignments and updates contain. ``alpha`` is the default of the paper's
            methods; searches and your own method need ``losses``.
        selection: ``uniform`` draws without replacement; ``proportional`` draws with replacement,
            in proportion to the clients' numbers of examples (as in the paper's proof).
        aggregation: ``plain`` is the mean of the clients' alpha (the paper's Algorithm 1);
            ``examples`` weights it by the clients' numbers of examples (the paper's code).
        min_clients: The first round starts when this many clients wait for work. Null means all
            clients of `data`. Without `data` null means `clients_per_round`, or 1 with selection
            ``proportional``.
        deadline_s: A client loses its place in the round after this many seconds without a message.
        own_models: What the budget is charged for the work of a device with its own model.
            ``charged``: the reserved amount; ``trusted``: the amount that the device reports. With
            null, a run with a gateway refuses such devices, and other runs use ``charged``.
        model: Fingerprint of the model that devices with their own model must have. Null is the
            gateway's model; a run without a gateway must set it.
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
    """Measurement of the deployable prompt, the best choice so far, on the dev split.

    Attributes:
        every: Rounds between measurements; 0 measures only before and after the run.
        examples: Dev examples per measurement; the first and last measurement use the whole split.
    """

    every: Annotated[int, Field(ge=0)] = 10
    examples: _Count = 256


class CalibrationSpec(Spec):
    """Correction of label bias (docs/explanation/calibration.md). The section may be only the kind.

    Attributes:
        kind: ``labels`` fits a bias for each prompt. The updates then contain derivatives of the
            losses; there are no further queries. The method must be a search, and the loss a
            cross-entropy. ``auto`` is ``labels`` if the run supports it, and ``none`` if not.
    """

    kind: Literal["auto", "none", "labels"] = "auto"

    @model_validator(mode="before")
    @classmethod
    def _kind_for_short(cls, value: object) -> Any:
        return {"kind": value} if isinstance(value, str) else value


class DefenceSpec(Spec):
    """Defences against false losses (docs/explanation/defences.md). The section may be only a kind.

    Attributes:
        kind: ``none``, or ``standard`` for devices that you do not control: the server scales down
            long steps of alpha, and rejects updates that disagree with the run.
        loss_clip: Upper limit G: mean losses are clipped to [0, G]. With ``standard`` the default
            is 20; set null if the task's losses are larger, such as ``nll`` of long texts.
        outliers: An update is rejected if it disagrees with the run by this many robust standard
            deviations. With ``standard`` the default is 3. With null, no update is rejected; set
            null if honest clients may have opposite data.
    """

    trust_region: ClassVar[float] = 1.5
    """Maximum step of alpha, as a multiple of the median step; honest steps rarely exceed it."""

    widest_region: ClassVar[float] = 10.0
    """The same maximum without a defence, for methods whose steps have no other bound (SGD)."""

    quarantine: ClassVar[int] = 2
    """A client gets no more work if at least this many of its updates, and more than half of them,
    were rejected."""

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
    def checks_updates(self) -> bool:
        """Whether the server checks updates, in addition to the clipping of losses."""
        return self.kind == "standard"


class PrivacySpec(Spec):
    """Clipping and Gaussian noise on the device (docs/explanation/privacy.md).

    Attributes:
        target: ``losses`` clips each example's loss and adds noise to each prompt's mean loss. This
            protects one example. ``alpha`` clips the step of alpha and adds noise to each entry.
            This protects all data of a device; it needs the ``alpha`` exchange.
        clip: Maximum loss of one example, or maximum L2 norm of a step of alpha.
        noise_multiplier: Standard deviation of the noise, divided by the L2 sensitivity.
        delta: The delta of (epsilon, delta)-differential privacy.
        max_epsilon: A device that has spent this epsilon in the run gets no more work of the run.
    """

    target: Literal["losses", "alpha"] = "losses"
    clip: Annotated[float, Field(ge=1e-3, le=1e3)]
    noise_multiplier: Annotated[float, Field(ge=0.1, le=1e3)]
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    max_epsilon: _Positive | None = None


class RequiredPrivacy(Spec):
    """What a device requires of the runs that it works for (docs/explanation/privacy.md).

    Attributes:
        max_epsilon: Maximum total epsilon of the device; it declines work that would exceed it.
        delta: The delta of (epsilon, delta)-differential privacy, independent of the run's delta.
        min_noise_multiplier: The device declines work with a smaller noise multiplier.
        unit: Unit of privacy. ``label``: the label of one example; the server may see texts.
            ``example``: one whole example. ``device``: all data of the device; only runs with
            target ``alpha`` protect them.
    """

    max_epsilon: _Positive
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    min_noise_multiplier: _Positive | None = None
    unit: Literal["label", "example", "device"] = "example"
