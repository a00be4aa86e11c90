"""The black-box methods as RUN.yaml names them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedone_sdk.spec.base import Spec

__all__ = ["BdplSpec", "EvolutionSpec", "GsBdplSpec", "MethodSpec", "Rate"]

Rate = Annotated[float, Field(gt=0, le=1e6)]
"""A learning rate."""


class _MethodSpec(Spec):
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
    """

    name: Literal["bdpl"]
    estimator: Literal["negative", "zero", "normalize"] = "zero"
    optimizer: Literal["sgd", "adamw"] = "adamw"
    learning_rate: Rate = 3e-4
    weight_decay: Annotated[float, Field(gt=0, le=1)] | None = None
    alpha_min: Annotated[float, Field(gt=0, le=1)] = 1e-5


class EvolutionSpec(_MethodSpec):
    """A population of prompts: elite, crossover, mutation, leaders evaluated again.

    Attributes:
        num_samples: I, prompts per local step.
        local_steps: E.
        batch_size: B, examples per mini-batch.
        elite: How many of the best prompts have children.
        mutation_rate: Per position; null means 1/n.
        pool_size: How many prompts are remembered.
    """

    name: Literal["evolution"]
    elite: Annotated[int, Field(ge=1, le=1000)] = 8
    mutation_rate: Annotated[float, Field(gt=0, le=1)] | None = None
    pool_size: Annotated[int, Field(ge=1, le=10_000)] = 64


MethodSpec = Annotated[GsBdplSpec | BdplSpec | EvolutionSpec, Field(discriminator="name")]
