"""Backends: adapters to black-box language models, and the client that sends queries to them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedone_sdk.backends.base import LOG_ZERO, Answer, LLMBackend, Query, RateLimits, Want, Wrapper
from fedone_sdk.backends.queries import (
    Prediction,
    check_answer,
    is_known,
    predict,
    prediction_queries,
    query_for,
    rows_of,
    score_all,
    want_of,
    written_query,
)
from fedone_sdk.imports import lazy

if TYPE_CHECKING:
    from fedone_sdk.backends.answers import AnswerCache
    from fedone_sdk.backends.build import build_backend, price_of
    from fedone_sdk.backends.label_words import usable_vocabulary
    from fedone_sdk.backends.llama_cpp import LlamaCppBackend
    from fedone_sdk.backends.model_client import ModelClient
    from fedone_sdk.backends.onnx import OnnxBackend
    from fedone_sdk.backends.openai import OpenAIBackend
    from fedone_sdk.backends.transformers import TransformersBackend
    from fedone_sdk.backends.vllm import VllmBackend
else:
    # An edge device that uses the gateway imports no model library.
    __getattr__, __dir__ = lazy(
        globals(), "model_client onnx answers label_words build llama_cpp openai transformers vllm"
    )

__all__ = [
    "Answer",
    "AnswerCache",
    "LLMBackend",
    "LOG_ZERO",
    "LlamaCppBackend",
    "ModelClient",
    "OnnxBackend",
    "OpenAIBackend",
    "Prediction",
    "Query",
    "RateLimits",
    "TransformersBackend",
    "VllmBackend",
    "Want",
    "Wrapper",
    "build_backend",
    "check_answer",
    "is_known",
    "predict",
    "prediction_queries",
    "price_of",
    "query_for",
    "rows_of",
    "score_all",
    "usable_vocabulary",
    "want_of",
    "written_query",
]
