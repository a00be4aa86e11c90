"""Updates, receipts and declined assignments."""

from __future__ import annotations

import operator
from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, FailFast, Field, TypeAdapter

from fedone_sdk.budget import Usage
from fedone_sdk.messages.base import MAX_MODEL_CHARS, ONE_LINE, Id, Message, is_none
from fedone_sdk.messages.score import Proposal
from fedone_sdk.messages.tensor import Tensor

MIN_SCORED_SHARE = 0.8
"""Minimal share of the mini-batch that must be scored for a valid update."""

MAX_LOSS = 1e6
"""Maximum of a loss: far above real losses, and so small that sums and gradients stay finite."""

_Loss = Annotated[float, Field(ge=-MAX_LOSS, le=MAX_LOSS)]

_Count = Annotated[int, Field(ge=0, le=2**31)]

_NoisedCount = Annotated[float, Field(ge=-(2**31), le=2**31)]

_MOST_REPORTED = 2**40


def _plausible(usage: Usage) -> Usage:
    """Check that reported usage is bounded, so that sums of it are bounded too."""
    if any(amount > _MOST_REPORTED for amount in usage.model_dump().values()):
        raise ValueError(f"is more than {_MOST_REPORTED}, the maximum of every unit")
    return usage


_Reported = Annotated[Usage, AfterValidator(_plausible)]


class Scored(Message):
    """Counts of the mini-batch's examples.

    Attributes:
        scored: Number of scored examples.
        failed: Number of examples for which the model failed; excluded from the losses.
        vetoed: Number of examples that the client's hook rejected; excluded from the losses.
    """

    scored: _Count
    failed: _Count = 0
    vetoed: _Count = 0

    def __add__(self, other: Scored) -> Scored:
        return Scored(
            scored=self.scored + other.scored,
            failed=self.failed + other.failed,
            vetoed=self.vetoed + other.vetoed,
        )


class _Update(Message):
    num_examples: Annotated[int, Field(ge=1, le=2**31)]
    scored: Scored
    usage: _Reported
    model: Annotated[str, Field(min_length=1, max_length=MAX_MODEL_CHARS)]


class AlphaUpdate(_Update):
    """The update of the ``alpha`` exchange.

    Attributes:
        num_examples: Number of the client's examples; the update's weight in the aggregation.
        usage: Usage of the client's own backend; zero if the gateway has scored.
        mean_loss: Mean loss over all scored prompts, for the run's history.
    """

    exchange: Literal["alpha"] = "alpha"
    alpha: Tensor
    mean_loss: _Loss


class LossesUpdate(_Update):
    """The update of the ``losses`` exchange.

    Attributes:
        losses: The mean loss of each prompt of the assignment, with the prompt's label bias if the
            assignment has `biases`.
        by_class: Only in runs with label calibration: float32, shape (I, K, 2 + C), for I prompts,
            K groups of scored examples and C labels. Each class is a group; with more than 4
            labels, or with `privacy`, all examples are one group. The numbers of a group are the
            mean loss, the mean of 1 minus the sum of squared label probabilities, and the mean
            probability of each label. They are computed with the prompt's label bias. They are 0
            for a group without scored examples.
        class_counts: Number of scored examples of each class, shape (C,); empty without `by_class`.
            In a run with `privacy` the numbers have noise.
        proposal: A new candidate, if the assignment has `reflect` and the device proposes one.
    """

    exchange: Literal["losses"] = "losses"
    losses: Annotated[tuple[_Loss, ...], FailFast(), Field(min_length=2, max_length=65536)]
    by_class: Tensor | None = None
    class_counts: Annotated[tuple[_NoisedCount, ...], FailFast(), Field(max_length=64)] = ()
    proposal: Proposal | None = Field(default=None, exclude_if=is_none)


Update = Annotated[AlphaUpdate | LossesUpdate, Field(discriminator="exchange", title="Update")]
UPDATE: TypeAdapter[AlphaUpdate | LossesUpdate] = TypeAdapter(
    Update, config=ConfigDict(defer_build=True)
)


class Receipt(Message):
    """Response to an accepted update. If the update is sent again, the response is the same."""

    assignment_id: Id
    round: int
    body_sha256: str


class Decline(Message):
    """``POST /v1/assignments/{id}/decline``: the client cannot do the work.

    Attributes:
        usage: Usage of the client's own backend; zero if it uses the gateway.
        unfit: Whether the client is unfit for all work of this run, because of its data, settings
            or installed packages. It gets no more work of this run until it sets `Claim.changed`.
    """

    reason: Annotated[str, Field(max_length=500), ONE_LINE]
    usage: _Reported = Usage()
    unfit: Annotated[bool, Field(exclude_if=operator.not_)] = False
