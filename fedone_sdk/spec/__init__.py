"""Strict models of RUN.yaml."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedone_sdk._lazy import lazy

# Submodules are imported on first use, because an edge device uses few of them.
if TYPE_CHECKING:
    from fedone_sdk.spec.backends import (
        BackendSpec,
        LimitsSpec,
        LlamaCppSpec,
        OnnxSpec,
        OpenAISpec,
        OwnSpec,
        PriceSpec,
        RemoteSpec,
        RetrySpec,
        TransformersSpec,
        VllmSpec,
    )
    from fedone_sdk.spec.base import RunName, Spec, load_yaml, validate_spec
    from fedone_sdk.spec.methods import (
        BdplSpec,
        GsBdplSpec,
        MethodSpec,
        OwnMethodSpec,
        PoolSpec,
        RandomSpec,
        ThompsonSpec,
        TpeSpec,
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
            "backends": (
                "BackendSpec LimitsSpec LlamaCppSpec OnnxSpec OpenAISpec OwnSpec PriceSpec "
                "RemoteSpec RetrySpec TransformersSpec VllmSpec"
            ),
            "base": "RunName Spec load_yaml validate_spec",
            "methods": (
                "BdplSpec GsBdplSpec MethodSpec OwnMethodSpec PoolSpec RandomSpec ThompsonSpec "
                "TpeSpec"
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
    "BackendSpec",
    "BdplSpec",
    "CalibrationSpec",
    "DataSpec",
    "DefenceSpec",
    "DirichletSpec",
    "EvaluationSpec",
    "GatewayPolicy",
    "GsBdplSpec",
    "IidSpec",
    "LimitsSpec",
    "LlamaCppSpec",
    "MethodSpec",
    "OnnxSpec",
    "OpenAISpec",
    "OwnMethodSpec",
    "OwnSpec",
    "ParticipationSpec",
    "PoolSpec",
    "PriceSpec",
    "PrivacySpec",
    "PromptSpec",
    "RandomSpec",
    "RemoteSpec",
    "RetrySpec",
    "RunName",
    "RunSpec",
    "SlotSpec",
    "Spec",
    "ThompsonSpec",
    "TpeSpec",
    "TransformersSpec",
    "VllmSpec",
    "load_backend",
    "load_yaml",
    "validate_spec",
]
