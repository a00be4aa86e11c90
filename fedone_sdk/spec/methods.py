"""Methods in RUN.yaml."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, JsonValue, ValidationInfo, field_validator

from fedone_sdk.spec.base import Spec

Exchange = Literal["alpha", "losses"]
"""Contents of assignments and updates: alpha, or prompts and their losses."""


NumSamples = Annotated[int, Field(ge=2, le=65536, description="I, prompts per local step.")]
LocalSteps = Annotated[int, Field(ge=1, le=1024, description="E, local steps.")]
BatchSize = Annotated[int, Field(ge=1, le=1024, description="B, examples per mini-batch.")]


class _MethodSpec(Spec):
    pools: ClassVar[bool] = False
    exchange: ClassVar[Exchange] = "alpha"

    num_samples: NumSamples = 20
    local_steps: LocalSteps = 1
    batch_size: BatchSize = 32

    @property
    def label(self) -> str:
        """What people call the method."""
        return str(getattr(self, "name", ""))

    @property
    def remembers(self) -> bool:
        """Whether clients keep state of the method between rounds."""
        return False


class GradientSpec(_MethodSpec):
    """The paper's methods: a gradient in a distribution over tokens.

    Attributes:
        name: ``gs-bdpl`` is Gumbel-Softmax black-box discrete prompt learning, ``bdpl`` the same on
            the simplex (Diao et al. 2022).
        tau: Gumbel-Softmax temperature; ``gs-bdpl`` only, 0.1 by default.
        optimizer: Optimiser of the local step; AdamW state is per client.
        learning_rate: Learning rate of the local step.
        alpha_min: Minimum of every entry.
    """

    name: Literal["gs-bdpl", "bdpl"] = "gs-bdpl"
    tau: Annotated[float, Field(gt=0, le=100)] | None = Field(default=None, validate_default=True)
    optimizer: Literal["sgd", "adamw"] = "adamw"
    learning_rate: Annotated[float, Field(gt=0, le=1e6)] = 3e-4
    alpha_min: Annotated[float, Field(gt=0, le=1)] = 1e-5

    @field_validator("tau")
    @classmethod
    def _check_tau(cls, tau: float | None, info: ValidationInfo) -> float | None:
        if info.data.get("name") != "bdpl":
            return 0.1 if tau is None else tau
        if tau is not None:
            raise ValueError("is no key of bdpl")
        return None

    @property
    def remembers(self) -> bool:
        """AdamW's moments."""
        return self.optimizer == "adamw"


class SearchSpec(_MethodSpec):
    """Searches over whole prompts, with one evaluator and successive halving at the end.

    Attributes:
        name: ``thompson`` samples from a Gaussian process over the prompts' shared candidates,
            ``random`` tries random prompts, and ``tpe`` is Optuna's Tree-structured Parzen
            Estimator (extra `optuna`).
        halving: Fraction of the run for successive halving. With 0, ``tpe`` deploys the prompt with
            the least mean loss.
    """

    pools: ClassVar[bool] = True
    exchange: ClassVar[Exchange] = "losses"

    name: Literal["thompson", "random", "tpe"] = "thompson"
    num_samples: NumSamples = 5
    batch_size: BatchSize = 16
    halving: Annotated[float, Field(ge=0, lt=1)] = 0.2


class OwnMethodSpec(_MethodSpec):
    """An algorithm of your own (`Algorithm`), which runs on the server alone.

    Attributes:
        object: The class or function that makes it: ``package.module:object``, also from a module
            next to the file, or the name of an entry point of the group ``fedone.methods``.
            Devices receive null.
        options: Its keyword arguments, in addition to those that the run gives
            (`fedone_sdk.algorithms.load_method`). Devices receive none.
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
        """Return the same without what only the server uses."""
        return self.model_copy(update={"object": None, "options": {}})


MethodSpec = Annotated[
    Annotated[GradientSpec | SearchSpec | OwnMethodSpec, Field(discriminator="name")],
    BeforeValidator(lambda value: {"name": value} if isinstance(value, str) else value),
]
