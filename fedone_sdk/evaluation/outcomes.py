"""The outcome of a prompt on each example, for intervals and confusion matrices."""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal, Self
from zlib import crc32

from pydantic import Field, ValidationError, model_validator

from fedone_sdk._values import Frozen
from fedone_sdk.algorithms import stream_seed
from fedone_sdk.backends import Prediction, price_of
from fedone_sdk.data import draw_minibatch
from fedone_sdk.errors import ResultError
from fedone_sdk.losses import example_loss, predicted
from fedone_sdk.spec import RunSpec
from fedone_sdk.stores import LogEntry
from fedone_sdk.task import Example, Score, target_of

OUTCOMES = "outcomes"
"""Kind of the log lines with outcomes."""

Which = Literal["no_prompt", "before", "cheapest", "after"]
"""Which prompt: "no prompt", the untrained prompt, a shorter prompt, or the deployable prompt."""

_Index = Annotated[int, Field(ge=-1, lt=64)]


class Outcomes(Frozen):
    """Results of one prompt for each example of the dev split, in order, without texts.

    None means that the model did not answer. Tasks without labels have losses only.

    Attributes:
        predicted: Index of the predicted label; -1 if the model wrote no label.
        targets: Index of the true label.
        losses: The task's loss.
        log_probs: Log-probabilities of the labels without a label bias, nats; only for "no prompt"
            and the untrained prompt.
        rows_crc32: Checksum of the examples; None if it is unknown.
    """

    which: Which
    predicted: tuple[_Index | None, ...] = ()
    targets: tuple[_Index, ...] = ()
    losses: tuple[float | None, ...] = ()
    log_probs: tuple[tuple[float, ...] | None, ...] = Field(default=(), exclude_if=operator.not_)
    rows_crc32: int | None = None

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if len(self.predicted) != len(self.targets):
            raise ValueError("there are not as many predictions as targets")
        if self.log_probs and len(self.log_probs) != len(self.targets):
            raise ValueError("there are not as many log-probabilities as targets")
        return self

    def on(self, rows: Sequence[int]) -> Self:
        """Return the outcomes of some examples."""
        names = ("predicted", "targets", "losses", "log_probs")
        values = {name: getattr(self, name) for name in names}
        update = {
            name: tuple(column[row] for row in rows) for name, column in values.items() if column
        }
        return self.model_copy(update=update)

    @classmethod
    def of(cls, which: Which, prediction: Prediction) -> Self:
        """Return the outcomes of a prediction."""
        task, pairs = prediction.task, list(zip(prediction.rows, prediction.examples, strict=True))
        labels: dict[str, object] = {}
        if not task.generates:
            labels = {
                "predicted": tuple(
                    None if row is None or isinstance(row, Score) else predicted(task, row)
                    for row, _ in pairs
                ),
                "targets": tuple(int(target_of(task, example)) for _, example in pairs),
                "log_probs": prediction.rows if which in ("no_prompt", "before") else (),
            }
        losses = tuple(
            None if row is None else example_loss(task, row, example) for row, example in pairs
        )
        rows = json.dumps(prediction.examples, skipkeys=True, default=str).encode()
        labels |= {"which": which, "losses": losses, "rows_crc32": crc32(rows)}
        return cls.model_validate(labels)


def curve_rows(spec: RunSpec, count: int) -> list[int]:
    """Return the indices of the dev rows (of `count`) on which the learning curve is measured."""
    seed = stream_seed(spec.seed, "evaluation", 0)
    return sorted(draw_minibatch(count, spec.evaluation.examples, seed)) if count else []


def curve_examples(spec: RunSpec, examples: Sequence[Example]) -> list[Example]:
    """Return the dev examples on which the learning curve is measured."""
    return [examples[row] for row in curve_rows(spec, len(examples))]


def seeks_cheapest(spec: RunSpec) -> bool:
    """Return whether a run also measures a shorter prompt that may be as good as the best."""
    price = price_of(spec.backend)
    return spec.method.pools and price is not None and price.prompt > 0


def newest_outcomes(log: Iterable[LogEntry]) -> dict[Which, Outcomes]:
    """Return the newest outcomes of each prompt in a log.

    Args:
        log: Log lines in order, with all lines of the kinds `OUTCOMES` and ``rollback``. After a
            rollback, earlier outcomes of the deployable and the shorter prompt do not count.
    """
    newest: dict[Which, Outcomes] = {}
    for entry in log:
        if entry.kind == OUTCOMES:
            try:
                outcomes = Outcomes.model_validate_json(entry.body)
            except ValidationError as exc:
                raise ResultError(f"a log line of kind {OUTCOMES} is invalid") from exc
            newest[outcomes.which] = outcomes
        elif entry.kind == "rollback":
            newest.pop("after", None)
            newest.pop("cheapest", None)
    return newest
