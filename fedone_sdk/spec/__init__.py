"""What people write in RUN.yaml, as strict models."""

from fedone_sdk.spec.backends import (
    BackendSpec,
    GatewaySpec,
    LimitsSpec,
    OnnxSpec,
    OpenAISpec,
    PriceSpec,
    RetrySpec,
    TransformersSpec,
    VllmSpec,
)
from fedone_sdk.spec.base import Spec, load_yaml, validate_spec
from fedone_sdk.spec.defence import DefenceSpec
from fedone_sdk.spec.methods import BdplSpec, EvolutionSpec, GsBdplSpec, MethodSpec
from fedone_sdk.spec.privacy import PrivacySpec
from fedone_sdk.spec.run import (
    DataSpec,
    DirichletSpec,
    EvaluationSpec,
    GatewayPolicy,
    IidSpec,
    ParticipationSpec,
    PromptSpec,
    RunName,
    RunSpec,
)

__all__ = [
    "BackendSpec",
    "BdplSpec",
    "DataSpec",
    "DefenceSpec",
    "DirichletSpec",
    "EvaluationSpec",
    "EvolutionSpec",
    "GatewayPolicy",
    "GatewaySpec",
    "GsBdplSpec",
    "IidSpec",
    "LimitsSpec",
    "MethodSpec",
    "OnnxSpec",
    "OpenAISpec",
    "ParticipationSpec",
    "PriceSpec",
    "PrivacySpec",
    "PromptSpec",
    "RetrySpec",
    "RunName",
    "RunSpec",
    "Spec",
    "TransformersSpec",
    "VllmSpec",
    "load_yaml",
    "validate_spec",
]
