"""Correction of a model's label bias, in RUN.yaml."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import model_validator

from fedone_sdk.calibration import LabelFree
from fedone_sdk.spec.base import Spec


class CalibrationSpec(Spec):
    """Correction of label bias (docs/explanation/calibration.md); may be written as its kind.

    Attributes:
        kind: ``auto`` is ``labels`` if the run supports it, else ``none``. ``labels``: updates have
            losses by class on a grid of label biases, at no further query, and the method fits a
            bias for each prompt; it needs a method with a pool of prompts, a cross-entropy over a
            few label words, and no privacy. Without labels, and only for measurements:
            ``contextual`` takes the bias from the model's answers to inputs without content, with
            one more query per measurement, and ``batch`` from the inputs that are predicted
            together.
    """

    kind: Literal["auto", "none", "labels", "contextual", "batch"] = "auto"

    @model_validator(mode="before")
    @classmethod
    def _kind_for_short(cls, value: object) -> Any:
        return {"kind": value} if isinstance(value, str) else value

    @property
    def label_free(self) -> LabelFree | None:
        """The method of label-free calibration; None if there is none."""
        return self.kind if self.kind == "contextual" or self.kind == "batch" else None
