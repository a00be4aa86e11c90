"""The black-box methods as RUN.yaml names them."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from fedone_sdk.spec.base import Spec

__all__ = [
    "BbtSpec",
    "BdplSpec",
    "Domain",
    "EvolutionSpec",
    "GsBdplSpec",
    "MethodSpec",
    "PTuningV2Spec",
    "PoolSpec",
    "PromptTuningSpec",
    "RandomSpec",
    "Rate",
    "ThompsonSpec",
    "TpeSpec",
    "TrainedSpec",
]

Rate = Annotated[float, Field(gt=0, le=1e6)]
"""A learning rate."""

Domain = Literal["tokens", "latent", "parameters"]
"""What is tuned: a distribution over tokens, a vector that a projection makes a soft prompt of, or
the parameters of a soft prompt themselves, which clients train with the model's gradients."""


class _Common(Spec):
    domain: ClassVar[Domain] = "tokens"
    pools: ClassVar[bool] = False

    def shape(self, prompt_len: int, vocab_size: int) -> tuple[int, int]:
        """Rows and columns of alpha, the array that clients and server exchange.

        Args:
            prompt_len: n.
            vocab_size: N; of no interest where there is no vocabulary.
        """
        return prompt_len, vocab_size

    def prompt_width(self, prompt_len: int) -> int:
        """How many numbers one candidate prompt is."""
        return prompt_len

    @property
    def remembers(self) -> bool:
        """Whether each client remembers something of the method from round to round."""
        return False

    def travelling_memory(self, prompt_len: int, points: int) -> int:
        """Size of the largest array that travels beside alpha, in float32; 0 where none does.

        Args:
            prompt_len: n.
            points: Numbers that a prompt's loss is told as: C x G under calibration, else 1.
        """
        return 0


class _MethodSpec(_Common):
    num_samples: Annotated[int, Field(ge=2, le=65536)] = 20
    local_steps: Annotated[int, Field(ge=1, le=1024)] = 1
    batch_size: Annotated[int, Field(ge=1, le=1024)] = 32


class GsBdplSpec(_MethodSpec):
    """Gumbel-Softmax black-box discrete prompt learning, the paper's method.

    Attributes:
        num_samples: I, prompts per local step.
        local_steps: E.
        batch_size: B, examples per mini-batch.
        tau: Gumbel-Softmax temperature.
        optimizer: Of the local step; AdamW state is per client.
        learning_rate: Of the local step.
        weight_decay: Of AdamW; null means its default, 0.01.
        alpha_init: Start of every entry; null means 1/N.
        alpha_min: Floor of every entry.
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
        num_samples: I, prompts per local step.
        local_steps: E.
        batch_size: B, examples per mini-batch.
        estimator: Which score function.
        optimizer: Of the local step; AdamW state is per client.
        learning_rate: Of the local step.
        weight_decay: Of AdamW; null means its default, 0.01.
        alpha_min: Floor of every probability.
        projection: ``simplex``; or ``capped``, as the paper's code has it: onto rows that sum to
            at most 1, so that a row below that stays as it is.
    """

    name: Literal["bdpl"]
    estimator: Literal["negative", "zero", "normalize"] = "zero"
    optimizer: Literal["sgd", "adamw"] = "adamw"
    learning_rate: Rate = 3e-4
    weight_decay: Annotated[float, Field(gt=0, le=1)] | None = None
    alpha_min: Annotated[float, Field(gt=0, le=1)] = 1e-5
    projection: Literal["simplex", "capped"] = "simplex"

    @property
    def remembers(self) -> bool:
        """AdamW's moments."""
        return self.optimizer == "adamw"


class PoolSpec(_MethodSpec):
    """What searches over whole prompts have in common: one evaluator, and a race at the end."""

    pools: ClassVar[bool] = True

    elite: Annotated[int, Field(ge=1, le=1000)] = 4
    pool_size: Annotated[int, Field(ge=2, le=2000)] = 256
    race: Annotated[float, Field(ge=0, lt=1)] = 0.2
    patience: Annotated[int, Field(ge=1, le=10**9)] | None = None

    def travelling_memory(self, prompt_len: int, points: int) -> int:
        """The prompts, in int64, or their losses (4 are remembered for each prompt)."""
        return self.pool_size * max(2 * prompt_len, 4 * max(points, 2))


class EvolutionSpec(PoolSpec):
    """A population of prompts: children of the elite, leaders evaluated again.

    Attributes:
        num_samples: I, prompts per local step.
        local_steps: E.
        batch_size: B, examples per mini-batch.
        elite: How many of the best prompts have children, and are never forgotten.
        mutation_rate: Per position; null means 1/n.
        pool_size: How many prompts are remembered.
        race: Part of the run in which the best prompts race, in the ``losses`` exchange.
        patience: Local steps without a better incumbent before the race starts; null disables this.
    """

    name: Literal["evolution"]
    mutation_rate: Annotated[float, Field(gt=0, le=1)] | None = None


class RandomSpec(PoolSpec):
    """Random prompts, the best of them evaluated again.

    Attributes:
        num_samples: I, prompts per local step.
        local_steps: E.
        batch_size: B, examples per mini-batch.
        elite: How many of the best prompts are never forgotten.
        pool_size: How many prompts are remembered.
        race: Part of the run in which the best prompts race, in the ``losses`` exchange.
        patience: Local steps without a better incumbent before the race starts; null disables this.
    """

    name: Literal["random"]


class ThompsonSpec(PoolSpec):
    """Thompson sampling from a Gaussian process over what prompts have in common.

    Attributes:
        num_samples: I, prompts per local step.
        local_steps: E.
        batch_size: B, examples per mini-batch.
        elite: How many of the best prompts are never forgotten.
        pool_size: How many prompts are remembered.
        race: Part of the run in which the best prompts race, in the ``losses`` exchange.
        patience: Local steps without a better incumbent before the race starts; null disables this.
    """

    name: Literal["thompson"]


class TpeSpec(PoolSpec):
    """The Tree-structured Parzen Estimator of Optuna (extra `optuna`), to compare with.

    Attributes:
        num_samples: I, prompts per local step.
        local_steps: E.
        batch_size: B, examples per mini-batch.
        elite: How many of the best prompts are never forgotten.
        pool_size: How many prompts are remembered.
        race: Part of the run in which the best prompts race, in the ``losses`` exchange; with 0 it
            is plain TPE, and the prompt with the least mean loss is handed out.
        patience: Local steps without a better incumbent before the race starts; null disables this.
    """

    name: Literal["tpe"]


class BbtSpec(_MethodSpec):
    """Black-box tuning of a soft prompt by CMA-ES (Sun et al. 2022).

    It needs a model that takes input embeddings.

    Attributes:
        num_samples: The population of CMA-ES: prompts per local step.
        local_steps: E, generations.
        batch_size: B, examples per mini-batch.
        intrinsic_dim: d, numbers that are searched; a random projection makes n embeddings of
            them.
        sigma: First step size of CMA-ES.
        bound: No number that the model is shown leaves [-bound, bound].
        scale: Standard deviation of the projected embeddings at the first step, in that of the
            model's own.
        projection_seed: Seeds the projection, which is never sent.
        memory: Who keeps the state of CMA-ES beside its mean: each ``client`` (in the paper's code
            each visit starts with none), or the ``run``: then it travels with alpha, or stays on
            the server.
    """

    domain: ClassVar[Domain] = "latent"

    name: Literal["bbt"]
    intrinsic_dim: Annotated[int, Field(ge=2, le=10_000)] = 500
    sigma: Annotated[float, Field(ge=1e-6, le=100)] = 1.0
    bound: Annotated[float, Field(gt=0, le=1e6)] = 5.0
    scale: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    projection_seed: Annotated[int, Field(ge=0, lt=2**53)] = 0
    memory: Literal["client", "run"] = "client"

    def shape(self, prompt_len: int, vocab_size: int) -> tuple[int, int]:
        """One vector of d numbers."""
        return 1, self.intrinsic_dim

    def prompt_width(self, prompt_len: int) -> int:
        """The d numbers."""
        return self.intrinsic_dim

    @property
    def remembers(self) -> bool:
        """The state of CMA-ES."""
        return self.memory == "client"

    def travelling_memory(self, prompt_len: int, points: int) -> int:
        """A triangle of the covariance, in float64."""
        return self.intrinsic_dim * (self.intrinsic_dim + 1) if self.memory == "run" else 0


class _TrainedSpec(_Common):
    domain: ClassVar[Domain] = "parameters"

    local_steps: Annotated[int, Field(ge=1, le=1024)] = 1
    batch_size: Annotated[int, Field(ge=1, le=1024)] = 32
    learning_rate: Rate = 1e-2
    weight_decay: Annotated[float, Field(ge=0, le=1)] = 0.0
    patience: Annotated[int, Field(ge=1)] | None = None
    init_std: Annotated[float, Field(gt=0, le=100)] = 0.02
    hidden_size: Annotated[int, Field(ge=1, le=65_536)]

    @property
    def num_samples(self) -> int:
        """No prompts are sampled."""
        return 0


class PromptTuningSpec(_TrainedSpec):
    """Prompt tuning (Lester et al. 2021): clients train n input embeddings by gradients.

    It needs the model's weights on the clients; no query is asked in training.

    Attributes:
        local_steps: E, steps of AdamW, which starts afresh at each visit.
        batch_size: B, examples per step.
        learning_rate: AdamW's.
        weight_decay: AdamW's.
        patience: Steps in a row without a loss below all before, after which a visit ends early;
            null takes all steps.
        init_std: Standard deviation of the first values.
        hidden_size: H, width of the model.
    """

    name: Literal["prompt-tuning"]

    def shape(self, prompt_len: int, vocab_size: int) -> tuple[int, int]:
        """One vector of the model's width for each of n positions."""
        return prompt_len, self.hidden_size


class PTuningV2Spec(_TrainedSpec):
    """P-tuning v2 (Liu et al. 2022): clients train n keys and values for every layer.

    It needs the model's weights on the clients; no query is asked in training.

    Attributes:
        local_steps: E, steps of AdamW, which starts afresh at each visit.
        batch_size: B, examples per step.
        learning_rate: AdamW's.
        weight_decay: AdamW's.
        patience: Steps in a row without a loss below all before, after which a visit ends early;
            null takes all steps.
        init_std: Standard deviation of the first values.
        hidden_size: H, width of a layer's keys; the model's, where heads share no keys.
        num_layers: L, attention layers of the model.
    """

    name: Literal["p-tuning-v2"]
    num_layers: Annotated[int, Field(ge=1, le=1000)]

    def shape(self, prompt_len: int, vocab_size: int) -> tuple[int, int]:
        """For each layer n keys, then n values, of the model's width."""
        return 2 * self.num_layers * prompt_len, self.hidden_size


TrainedSpec = PromptTuningSpec | PTuningV2Spec
"""The white-box methods."""

MethodSpec = Annotated[
    GsBdplSpec
    | BdplSpec
    | EvolutionSpec
    | RandomSpec
    | ThompsonSpec
    | TpeSpec
    | BbtSpec
    | TrainedSpec,
    Field(discriminator="name"),
]
