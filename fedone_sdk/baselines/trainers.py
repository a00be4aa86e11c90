"""The trainer of a run's method and model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedone_sdk.backends.wrappers import Wrapper
from fedone_sdk.baselines.soft_prompts import PromptTuning, PTuningV2, SoftPromptTrainer
from fedone_sdk.errors import SpecError
from fedone_sdk.spec import MethodSpec, PromptTuningSpec, PTuningV2Spec

if TYPE_CHECKING:
    from fedone_sdk.backends import LLMBackend
    from fedone_sdk.backends.transformers import TransformersBackend


def trainer_of(method: MethodSpec, backend: LLMBackend) -> SoftPromptTrainer | None:
    """Return the trainer of a method's soft prompt; None for black-box methods.

    Raises:
        SpecError: The backend does not have the model's weights.
    """
    if isinstance(method, PromptTuningSpec):
        return PromptTuning(bare_model(backend))
    if isinstance(method, PTuningV2Spec):
        return PTuningV2(bare_model(backend))
    return None


def bare_model(backend: LLMBackend) -> TransformersBackend:
    """Return the transformers model inside its wrappers.

    Raises:
        SpecError: It is another kind of model.
    """
    from fedone_sdk.backends.transformers import TransformersBackend

    while isinstance(backend, Wrapper):
        backend = backend.inner
    if not isinstance(backend, TransformersBackend):
        raise SpecError("backend.kind: white-box methods need transformers")
    return backend
