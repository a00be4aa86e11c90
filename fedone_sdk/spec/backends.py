"""Language models in RUN.yaml. They contain no secrets, only the variables that hold them."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import (
    Field,
    JsonValue,
    field_validator,
    model_validator,
)

from fedone_sdk.budget import Price
from fedone_sdk.spec.base import Spec

_EnvName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=200)]
_Seconds = Annotated[float, Field(gt=0, le=86_400)]


class RetrySpec(Spec):
    """Retries of requests. Every attempt is charged to the budget.

    Attributes:
        attempts: Maximum attempts per request; 1 disables retries.
        max_wait_s: Maximum delay between two attempts, in seconds; also caps ``Retry-After``.
        breaker_failures: Number of failed attempts in a row, over all requests, after which the run
            pauses.
    """

    attempts: Annotated[int, Field(ge=1, le=50)] = 6
    max_wait_s: _Seconds = 60.0
    breaker_failures: Annotated[int, Field(ge=1, le=100_000)] = 100


class LimitsSpec(Spec):
    """Rate limits of the model.

    Attributes:
        requests_per_minute: Null applies only the limits in the provider's headers.
        tokens_per_minute: Prompt and completion tokens; null as above.
        concurrency: Maximum concurrent requests.
    """

    requests_per_minute: Annotated[float, Field(gt=0, le=1e9)] | None = None
    tokens_per_minute: Annotated[float, Field(gt=0, le=1e12)] | None = None
    concurrency: Annotated[int, Field(ge=1, le=10_000)] = 32


PriceSpec = Price
"""Prices of a model, from a backend's ``prices``."""


class _Answering(Spec):
    """Options of every kind."""

    cache: str | None = Field(
        default=None,
        description="SQLite file that keeps paid answers across runs; null caches in memory only.",
    )


class OnnxSpec(_Answering):
    """A masked language model run by onnxruntime.

    Attributes:
        model: Folder with ``model.int8.onnx`` or ``model.onnx`` and ``tokenizer.json``; null is
            the SDK's built-in model.
        threads: Concurrent queries; null is one per core, at most 4.
    """

    kind: Literal["onnx"] = "onnx"
    model: str | None = None
    threads: Annotated[int, Field(ge=1, le=256)] | None = None


class TransformersSpec(_Answering):
    """A model of the transformers library, run by torch in this process.

    Attributes:
        model: Folder, or name on the hub.
        revision: Revision on the hub; null is the newest.
        device: ``cpu``, ``cuda``, ``cuda:1`` ...; ``auto`` is CUDA if available, else the CPU.
        dtype: Type of weights and arithmetic; log-probabilities are always float32.
        max_batch: Maximum rows per forward pass: one row per input, or one per input and label
            word if label words have several tokens.
        multi_token_labels: Allows a causal model's label words of several tokens, each scored by
            the sum of its tokens' log-probabilities.
    """

    kind: Literal["transformers"]
    model: Annotated[str, Field(min_length=1)]
    revision: str | None = None
    device: Annotated[str, Field(pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$")] = "auto"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    max_batch: Annotated[int, Field(ge=1, le=65_536)] = 256
    multi_token_labels: bool = False


class LlamaCppSpec(_Answering):
    """A causal model in a GGUF file, run by llama.cpp in this process.

    Attributes:
        model: The file, or the name of a fetched model (`fedone models`).
        context_length: Maximum tokens per input; null is the model's training length, at most
            4096.
        threads: CPU threads; null is one per core.
        gpu_layers: Layers on a GPU, with a GPU build of the engine; null is as many as fit.
        multi_token_labels: Allows label words of several tokens, each scored by the sum of its
            tokens' log-probabilities.
    """

    kind: Literal["llama_cpp"]
    model: Annotated[str, Field(min_length=1)]
    context_length: Annotated[int, Field(ge=16, le=1_000_000)] | None = None
    threads: Annotated[int, Field(ge=1, le=256)] | None = None
    gpu_layers: Annotated[int, Field(ge=0, le=10_000)] | None = None
    multi_token_labels: bool = False


class RemoteSpec(_Answering):
    """Options of models behind HTTP."""

    timeout_s: _Seconds = Field(default=60.0, description="Time limit of a request, in seconds.")
    retry: RetrySpec = Field(default=RetrySpec(), description="Retries of requests.")
    limits: LimitsSpec = Field(default=LimitsSpec(), description="Rate limits.")
    prices: PriceSpec | None = None

    @field_validator("base_url", check_fields=False)
    @classmethod
    def _check_url(cls, value: str | None) -> str | None:
        if value is None:
            return None
        if not value.startswith(("http://", "https://")) or "@" in value:
            raise ValueError("must be http://HOST... or https://HOST..., without a password")
        return value.rstrip("/")


class VllmSpec(RemoteSpec):
    """A vLLM server: a causal model, or RoBERTa with the SDK's plugin (`{mask}` in the template).

    Attributes:
        base_url: The server's URL, with or without ``/v1``.
        model: The server's name of the model.
        api_key_env: Environment variable that holds the key; null sends no key.
        tokenizer: ``tokenizer.json`` or a folder with it; null looks for one by the model's name,
            then falls back to the server, which is slower.
        multi_token_labels: Allows a causal model's label words of several tokens, each scored by
            the sum of its tokens' log-probabilities.
        prices: Prices; null is free of charge, for your own server.
    """

    kind: Literal["vllm"]
    base_url: str = "http://127.0.0.1:8000"
    model: Annotated[str, Field(min_length=1)]
    api_key_env: _EnvName | None = None
    tokenizer: str | None = None
    multi_token_labels: bool = False


class OpenAISpec(RemoteSpec):
    """OpenAI, or a service with its API.

    Attributes:
        model: The provider's name of the model.
        base_url: URL of the service, with its ``/v1``; null is OpenAI's own.
        api_key_env: Environment variable that holds the key; null sends no key.
        api: ``chat``, or ``completions`` for servers of the older kind.
        log_probs: Whether the model shows log-probabilities. Without them the task's loss must be
            ``zero_one``: the label that the model writes is right or wrong.
        structured: Without log-probabilities: whether a JSON schema restricts the answer to the
            label words, if the model supports that.
        reasoning_effort: Sent if set; newer models show log-probabilities only with ``none``.
        max_input_tokens: Maximum tokens per input, without the frame of the message; the text
            fields of longer inputs are truncated. It bounds the cost of a request.
        tokenizer: ``tokenizer.json`` for counting, or a folder with it; null looks for one by the
            model's name, then counts with tiktoken if it supports the model, else by bytes, which
            is an upper bound.
        prices: Prices; null uses the SDK's price table.
    """

    kind: Literal["openai"]
    model: Annotated[str, Field(min_length=1)]
    base_url: str | None = None
    api_key_env: _EnvName | None = "OPENAI_API_KEY"
    api: Literal["chat", "completions"] = "chat"
    log_probs: bool = True
    structured: bool = True
    reasoning_effort: Annotated[str, Field(max_length=20)] | None = None
    max_input_tokens: Annotated[int, Field(ge=16, le=1_000_000)] = 1024
    tokenizer: str | None = None

    @model_validator(mode="after")
    def _check_choice(self) -> Self:
        if self.api == "completions" and not self.log_probs:
            raise ValueError("log_probs: must be true for api completions")
        return self


class OwnSpec(RemoteSpec):
    """A user-defined backend (`LLMBackend`), behind the SDK's `ModelClient`.

    Attributes:
        object: The class or function that creates it: ``package.module:object``, also from a module
            next to the file, or the name of an entry point of the group ``fedone.backends``.
        options: Its keyword arguments.
        timeout_s: No effect; the backend has its own time limit.
        prices: Prices; null is unknown.
    """

    kind: Literal["own"]
    object: Annotated[str, Field(min_length=1, max_length=200)]
    options: dict[str, JsonValue] = Field(default_factory=dict)


BackendSpec = Annotated[
    OnnxSpec | LlamaCppSpec | TransformersSpec | VllmSpec | OpenAISpec | OwnSpec,
    Field(discriminator="kind"),
]
