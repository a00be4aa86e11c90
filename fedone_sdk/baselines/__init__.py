"""White-box baselines of the paper; they need the model's weights (extra `torch`)."""

from __future__ import annotations

from fedone_sdk.baselines.fine_tuning import FineTuned, FineTuning
from fedone_sdk.baselines.soft_prompts import (
    PromptTuning,
    PTuningV2,
    SoftPromptTrainer,
    bare_model,
    trainer_of,
)

__all__ = [
    "FineTuned",
    "FineTuning",
    "PTuningV2",
    "PromptTuning",
    "SoftPromptTrainer",
    "bare_model",
    "trainer_of",
]
