"""Language models that can only be asked, and wrappers around them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedone_sdk.backends.base import Answer, LLMBackend, Query
from fedone_sdk.backends.cache import CachedBackend
from fedone_sdk.backends.predict import Prediction, predict

if TYPE_CHECKING:
    from fedone_sdk.backends.onnx import OnnxBackend

__all__ = [
    "Answer",
    "CachedBackend",
    "LLMBackend",
    "OnnxBackend",
    "Prediction",
    "Query",
    "predict",
]


def __getattr__(name: str) -> object:
    # An edge device that asks through the gateway never pays for a local model.
    if name == "OnnxBackend":
        from fedone_sdk.backends.onnx import OnnxBackend

        return OnnxBackend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
