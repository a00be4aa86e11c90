"""The keys of RUN.yaml as pydantic models, which refuse unknown keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedone_sdk.imports import lazy

# Submodules are imported on first use, because an edge device uses few of them.
if TYPE_CHECKING:
    from fedone_sdk.spec.backends import BackendSpec, LimitsSpec, PricesSpec, RetrySpec
    from fedone_sdk.spec.base import RunName, Spec, load_yaml, validate_spec
    from fedone_sdk.spec.prompt import PromptSpec, SlotSpec
    from fedone_sdk.spec.run import RunSpec, load_backend
    from fedone_sdk.spec.sections import (
        CalibrationSpec,
        DataSpec,
        DefenceSpec,
        EvaluationSpec,
        GradientSpec,
        MethodSpec,
        OwnMethodSpec,
        ParticipationSpec,
        PrivacySpec,
        SearchSpec,
    )
else:
    __getattr__, __dir__ = lazy(globals(), "base sections backends prompt run")

__all__ = [
    "BackendSpec",
    "CalibrationSpec",
    "DataSpec",
    "DefenceSpec",
    "EvaluationSpec",
    "GradientSpec",
    "LimitsSpec",
    "MethodSpec",
    "OwnMethodSpec",
    "ParticipationSpec",
    "PricesSpec",
    "PrivacySpec",
    "PromptSpec",
    "RetrySpec",
    "RunName",
    "RunSpec",
    "SearchSpec",
    "SlotSpec",
    "Spec",
    "load_backend",
    "load_yaml",
    "validate_spec",
]
