"""What a measurement found example by example: what intervals and confusion come from."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from fedone_sdk.backends import Prediction
from fedone_sdk.task import example_loss, predicted, target_of

__all__ = ["OUTCOMES", "Outcomes", "Which"]

OUTCOMES = "outcomes"
"""The kind of a log's line that holds them."""

Which = Literal["no_prompt", "before", "after"]
"""Whose they are: no prompt's, the untrained prompt's, the deployable prompt's."""

_Index = Annotated[int, Field(ge=-1, lt=64)]


class Outcomes(BaseModel):
    """One prompt on each example of the dev split, in its order. No text stands in it.

    Attributes:
        which: Which prompt.
        predicted: Index of the predicted label: -1 where the model wrote none of them, null where
            it failed. Empty for tasks without labels.
        targets: Index of the true label. Empty for tasks without labels.
        losses: The task's loss, null where the model failed. Only where it is the metric.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    which: Which
    predicted: tuple[_Index | None, ...] = ()
    targets: tuple[_Index, ...] = ()
    losses: tuple[float | None, ...] = ()

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if len(self.predicted) != len(self.targets):
            raise ValueError("there are not as many predictions as targets")
        return self

    @classmethod
    def of(cls, which: Which, found: Prediction) -> Self:
        """What a prediction says of each example.

        Args:
            which: Which prompt was asked about.
            found: The prediction.

        Raises:
            SpecError: The user's score function is missing or broken.
        """
        task, pairs = found.task, list(zip(found.rows, found.examples, strict=True))
        labels: dict[str, tuple[int | None, ...]] = {}
        if not task.generates:
            labels = {
                "predicted": tuple(
                    None if row is None or isinstance(row, str) else predicted(task, row)
                    for row, _ in pairs
                ),
                "targets": tuple(int(target_of(task, example)) for _, example in pairs),
            }
        losses: tuple[float | None, ...] = ()
        if task.metric == "loss":
            losses = tuple(
                None if row is None else example_loss(task, row, example, found.score)
                for row, example in pairs
            )
        return cls.model_validate({"which": which, "losses": losses, **labels})
