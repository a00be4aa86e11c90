"""Methods in RUN.yaml."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, JsonValue

from fedone_sdk.spec.base import Spec

Rate = Annotated[float, Field(gt=0, le=1e6)]
"""A learning rate."""


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


class GsBdplSpec(_MethodSpec):
    """Gumbel-Softmax black-box discrete prompt learning, the paper's method.

    Attributes:
        tau: Gumbel-Softmax temperature.
        optimizer: Optimiser of the local step; AdamW state is per client.
        learning_rate: Learning rate of the local step.
        weight_decay: Weight decay of AdamW; null means its default, 0.01.
        alpha_init: Initial value of every entry; null means 1/N.
        alpha_min: Minimum of every entry.
    """

    name: Literal["gs-bdpl"] = "gs-bdpl"
    tau: Annotated[float, Field(gt=0, le=100)] = 0.1
    optimizer: Literal["sgd", "adamw"] = "adamw"
    learning_rate: Rate = 3e-4
    weight_decay: Annotated[float, Field(gt=0, le=1)] | None = None
    alpha_init: Annotated[float, Field(gt=0, le=1e6)] | None = None
    alpha_min: Annotated[float, Field(gt=0, le=1)] = 1e-5

    @property
    def remembers(self) -> bool:
        """AdamW's moments."""
        return self.optimizer == "adamw"


class BdplSpec(_MethodSpec):
    """Black-box discrete prompt learning on the simplex (Diao et al. 2022).

    Attributes:
        optimizer: Optimiser of the local step; AdamW state is per client.
        learning_rate: Learning rate of the local step.
        weight_decay: Weight decay of AdamW; null means its default, 0.01.
        alpha_min: Minimum of every probability.
    """

    name: Literal["bdpl"]
    optimizer: Literal["sgd", "adamw"] = "adamw"
    learning_rate: Rate = 3e-4
    weight_decay: Annotated[float, Field(gt=0, le=1)] | None = None
    alpha_min: Annotated[float, Field(gt=0, le=1)] = 1e-5

    @property
    def remembers(self) -> bool:
        """AdamW's moments."""
        return self.optimizer == "adamw"


class PoolSpec(_MethodSpec):
    """Options of searches over whole prompts, with one evaluator and a race at the end."""

    pools: ClassVar[bool] = True
    exchange: ClassVar[Exchange] = "losses"

    num_samples: NumSamples = 5
    batch_size: BatchSize = 16

    elite: int = Field(
        default=4, ge=1, le=1000, description="Number of best prompts that are never evicted."
    )
    pool_size: int = Field(default=256, ge=2, le=2000, description="Number of prompts in the pool.")
    race: float = Field(
        default=0.2,
        ge=0,
        lt=1,
        description="Fraction of the run for the race.",
    )
    patience: Annotated[int, Field(ge=1, le=10**9)] | None = Field(
        default=None,
        description="Local steps without a better incumbent after which the race begins; null is "
        "no early race.",
    )


class RandomSpec(PoolSpec):
    """Random prompts, with the best of them re-evaluated."""

    name: Literal["random"]


class ThompsonSpec(PoolSpec):
    """Thompson sampling from a Gaussian process over the prompts' shared features."""

    name: Literal["thompson"] = "thompson"


class TpeSpec(PoolSpec):
    """The Tree-structured Parzen Estimator of Optuna (extra `optuna`), for comparison.

    Attributes:
        race: Fraction of the run for the race; 0 is plain TPE, whose
            deployable prompt has the least mean loss.
    """

    name: Literal["tpe"]


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
    GsBdplSpec | BdplSpec | RandomSpec | ThompsonSpec | TpeSpec | OwnMethodSpec,
    Field(discriminator="name"),
]
