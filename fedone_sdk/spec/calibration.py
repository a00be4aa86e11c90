"""How a model's preference for some label words is made up for, as RUN.yaml says it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import model_validator

from fedone_sdk.calibration import LabelFree
from fedone_sdk.spec.base import Spec

__all__ = ["CalibrationSpec"]


class CalibrationSpec(Spec):
    """What is done about label bias (docs/explanation/calibration.md); its kind for short.

    Attributes:
        kind: ``auto`` is ``labels`` where a run allows it, else ``none``. ``labels``: losses are
            told by class on a grid of label biases, from answers that are paid for anyway, and the
            method finds a bias for each prompt; it needs a method that keeps a pool of prompts, a
            cross-entropy over a few label words, and no privacy. Without labels, and only where a
            prompt is measured: ``contextual`` takes the bias from what the model says of inputs
            without content, at one more query per measurement, and ``batch`` from the inputs that
            are predicted together.
    """

    kind: Literal["auto", "none", "labels", "contextual", "batch"] = "auto"

    @model_validator(mode="before")
    @classmethod
    def _kind_for_short(cls, value: object) -> Any:
        return {"kind": value} if isinstance(value, str) else value

    @property
    def label_free(self) -> LabelFree | None:
        """How predictions are calibrated without labels; None where they are not."""
        return self.kind if self.kind == "contextual" or self.kind == "batch" else None
