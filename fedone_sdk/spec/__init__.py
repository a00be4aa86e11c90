"""Strict models of RUN.yaml."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedone_sdk._lazy import lazy

# Submodules are imported on first use, because an edge device uses few of them.
if TYPE_CHECKING:
    from fedone_sdk.spec.backends import (
        BackendKind,
        BackendSpec,
        LimitsSpec,
        PricesSpec,
        RetrySpec,
    )
    from fedone_sdk.spec.base import RunName, Spec, load_yaml, validate_spec
    from fedone_sdk.spec.methods import (
        BbtSpec,
        BdplSpec,
        Domain,
        GsBdplSpec,
        MethodSpec,
        OwnMethodSpec,
        PoolSpec,
        PromptTuningSpec,
        PTuningV2Spec,
        RandomSpec,
        ThompsonSpec,
        TpeSpec,
        TrainedSpec,
    )
    from fedone_sdk.spec.prompt import PromptSpec, SlotSpec
    from fedone_sdk.spec.run import RunSpec, load_backend
    from fedone_sdk.spec.sections import (
        CalibrationSpec,
        DataSpec,
        DefenceSpec,
        DirichletSpec,
        EvaluationSpec,
        GatewayPolicy,
        IidSpec,
        ParticipationSpec,
        PrivacySpec,
    )
else:
    __getattr__, __dir__ = lazy(
        globals(),
        {
            "backends": "BackendKind BackendSpec LimitsSpec PricesSpec RetrySpec",
            "base": "RunName Spec load_yaml validate_spec",
            "methods": (
                "BbtSpec BdplSpec Domain GsBdplSpec MethodSpec OwnMethodSpec "
                "PoolSpec PromptTuningSpec PTuningV2Spec RandomSpec ThompsonSpec TpeSpec "
                "TrainedSpec"
            ),
            "prompt": "PromptSpec SlotSpec",
            "run": "RunSpec load_backend",
            "sections": (
                "CalibrationSpec DataSpec DefenceSpec DirichletSpec EvaluationSpec GatewayPolicy "
                "IidSpec ParticipationSpec PrivacySpec"
            ),
        },
    )

__all__ = [
    "BackendKind",
    "BackendSpec",
    "BbtSpec",
    "BdplSpec",
    "CalibrationSpec",
    "DataSpec",
    "DefenceSpec",
    "DirichletSpec",
    "Domain",
    "EvaluationSpec",
    "GatewayPolicy",
    "GsBdplSpec",
    "IidSpec",
    "LimitsSpec",
    "MethodSpec",
    "OwnMethodSpec",
    "PTuningV2Spec",
    "ParticipationSpec",
    "PoolSpec",
    "PricesSpec",
    "PrivacySpec",
    "PromptSpec",
    "PromptTuningSpec",
    "RandomSpec",
    "RetrySpec",
    "RunName",
    "RunSpec",
    "SlotSpec",
    "Spec",
    "ThompsonSpec",
    "TpeSpec",
    "TrainedSpec",
    "load_backend",
    "load_yaml",
    "validate_spec",
]
