"""The section `backend` of RUN.yaml. API keys are not in it, but in environment variables."""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, JsonValue, field_validator, model_validator

from fedone_sdk.spec.base import Spec

_EnvName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=200)]
_Seconds = Annotated[float, Field(gt=0, le=86_400)]
_Samples = Annotated[int, Field(ge=2, le=128)]
_Usd = Annotated[Decimal, Field(ge=0, le=1_000_000, allow_inf_nan=False)]


class RetrySpec(Spec):
    """Retries of requests. Every attempt is charged to the budget.

    Attributes:
        attempts: Maximum attempts per request; 1 disables retries.
        max_wait_s: Maximum delay between two attempts, seconds; also caps ``Retry-After``.
        breaker_failures: Number of failed attempts in a row, over all requests, after which the run
            pauses.
    """

    attempts: Annotated[int, Field(ge=1, le=50)] = 6
    max_wait_s: _Seconds = 60.0
    breaker_failures: Annotated[int, Field(ge=1, le=100_000)] = 100


class LimitsSpec(Spec):
    """Rate limits of the model.

    Attributes:
        requests_per_minute: Maximum requests; with null, only the limits that the provider states
            in response headers apply.
        tokens_per_minute: The same limit for prompt and completion tokens together.
        concurrency: Maximum concurrent requests.
    """

    requests_per_minute: Annotated[float, Field(gt=0, le=1e9)] | None = None
    tokens_per_minute: Annotated[float, Field(gt=0, le=1e12)] | None = None
    concurrency: Annotated[int, Field(ge=1, le=10_000)] = 32


class PricesSpec(Spec):
    """Prices of a model, US dollars.

    Attributes:
        prompt: Price per million prompt tokens, or a list of two prices: the second is for tokens
            in the provider's cache.
        completion: Price per million completion tokens.
    """

    prompt: _Usd | tuple[_Usd, _Usd]
    completion: _Usd


BackendKind = Literal["onnx", "llama_cpp", "transformers", "vllm", "openai", "own"]

_REMOTE = {"timeout_s", "retry", "limits", "prices"}
_KEYS: dict[str, set[str]] = {
    "onnx": {"model", "threads"},
    "llama_cpp": {"model", "threads", "max_input_tokens", "multi_token_labels"},
    "transformers": {"model", "device", "dtype", "multi_token_labels"},
    "vllm": {"model", "base_url", "api_key_env", "tokenizer", "multi_token_labels", *_REMOTE},
    "openai": {
        *("model", "base_url", "api_key_env", "tokenizer", "api", "log_probs"),
        *("reasoning_effort", "service_tier", "max_input_tokens", *_REMOTE),
    },
    "own": {"object", "options", *_REMOTE},
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "vllm": {"base_url": "http://127.0.0.1:8000"},
    "openai": {"api_key_env": "OPENAI_API_KEY", "max_input_tokens": 1024},
}
_REQUIRED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("llama_cpp", "transformers", "openai"), ("model",)),
    "vllm": ("model", "base_url"),
    "own": ("object",),
}


class BackendSpec(Spec):
    """A language model.

    Attributes:
        kind: ``onnx``, ``llama_cpp`` (a GGUF file) and ``transformers`` (needs torch) run in this
            process; ``vllm`` and ``openai`` call a server; ``own`` is your own `LLMBackend`.
        model: ``onnx``: folder with ``model.int8.onnx`` or ``model.onnx`` and ``tokenizer.json``;
            null is the built-in model. ``llama_cpp``: a GGUF file, or a name from `fedone models`.
            ``transformers``: folder, or name on the Hugging Face hub. ``vllm`` and ``openai``: the
            server's name for the model.
        cache: SQLite file that stores paid answers for later runs; null caches in memory only.
        threads: CPU threads. With null, ``llama_cpp`` uses one per core, and ``onnx`` one per core
            but at most 4.
        device: ``cpu``, ``cuda``, ``cuda:1``, ``mps``; ``auto`` is CUDA if available, else the CPU.
        dtype: Type of weights and arithmetic; log-probabilities are always float32.
        multi_token_labels: Whether a causal model may have label words of several tokens. The score
            of such a word is the sum of its tokens' log-probabilities.
        base_url: URL of the server; null is OpenAI's.
        api_key_env: Environment variable of the API key; null sends no key.
        tokenizer: ``tokenizer.json`` or its folder; null looks for one by the model's name. If
            there is none, ``vllm`` downloads it from the Hugging Face hub, and ``openai`` counts
            tokens with tiktoken if it supports the model, otherwise one token per 2 bytes.
        api: ``chat``, or ``completions`` for older servers.
        log_probs: Whether the model returns log-probabilities; ``{samples: 8}`` estimates them from
            up to 8 answers to each input. If false, the task's loss must be ``zero_one``.
        reasoning_effort: Sent if set; newer models return log-probabilities only with ``none``.
        service_tier: ``flex`` costs half at OpenAI. An answer may take minutes, so the default of
            `timeout_s` is then 900.
        max_input_tokens: Maximum tokens per input. ``openai``: text fields of longer inputs are
            truncated, which bounds the cost of a request. Tokens of the chat format are not
            counted. ``llama_cpp``: null is the model's context length, but at most 4096.
        timeout_s: Time limit of a request, seconds.
        prices: US dollars per million tokens. If null, OpenAI's models have the prices of the SDK's
            price table, ``vllm`` has the price 0, and other models have unknown prices.
        object: The class or function that makes your backend: ``package.module:object`` (the module
            may be next to the file), or the name of an entry point of ``fedone.backends``.
        options: Keyword arguments of `object`.
    """

    kind: BackendKind = "onnx"
    model: Annotated[str, Field(min_length=1)] | None = None
    cache: str | None = None
    threads: Annotated[int, Field(ge=1, le=256)] | None = None
    device: Annotated[str, Field(pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$")] = "auto"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    multi_token_labels: bool = False
    base_url: str | None = None
    api_key_env: _EnvName | None = None
    tokenizer: str | None = None
    api: Literal["chat", "completions"] = "chat"
    log_probs: bool | Annotated[dict[Literal["samples"], _Samples], Field(min_length=1)] = True
    reasoning_effort: Annotated[str, Field(max_length=20)] | None = None
    service_tier: Literal["flex"] | None = None
    max_input_tokens: Annotated[int, Field(ge=16, le=1_000_000)] | None = None
    timeout_s: _Seconds = 60.0
    retry: RetrySpec = RetrySpec()
    limits: LimitsSpec = LimitsSpec()
    prices: PricesSpec | None = None
    object: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    options: dict[str, JsonValue] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_kind(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        slow = {"timeout_s": 900.0} if value.get("service_tier") == "flex" else {}
        return {**_DEFAULTS.get(str(value.get("kind")), {}), **slow, **value}

    @field_validator("base_url")
    @classmethod
    def _check_url(cls, value: str | None) -> str | None:
        if value is None:
            return None
        if not value.startswith(("http://", "https://")) or "@" in value:
            raise ValueError("must be http://HOST... or https://HOST..., without a password")
        return value.rstrip("/")

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        allowed = {"kind", "cache", *_KEYS[self.kind]}
        for name, field in type(self).model_fields.items():
            if name not in allowed and getattr(self, name) != field.get_default(
                call_default_factory=True
            ):
                known = ", ".join(sorted(allowed))
                raise ValueError(f"{name}: is not a key of kind {self.kind} (allowed: {known})")
        for name in _REQUIRED.get(self.kind, ()):
            if getattr(self, name) is None:
                raise ValueError(f"{name}: is required")
        if self.api == "completions" and self.log_probs is not True:
            raise ValueError("log_probs: must be true for api completions")
        return self

    @property
    def is_remote(self) -> bool:
        """Whether the backend may call a server, and has `retry`, `limits` and `prices`."""
        return self.kind in ("vllm", "openai", "own")

    @property
    def adapter_options(self) -> dict[str, Any]:
        """The keyword arguments of the class that implements this kind."""
        names = _KEYS[self.kind] - {"retry", "limits", "prices"}
        return {name: getattr(self, name) for name in sorted(names)}


def _long_inputs(value: object) -> object:
    if isinstance(value, dict) and value.get("kind") == "openai":
        return {"max_input_tokens": 8192, **value}
    return value


WriterSpec = Annotated[BackendSpec, BeforeValidator(_long_inputs)]
"""A model that writes candidates or grades texts. With ``openai`` its `max_input_tokens` is 8192 by
default, because an input may contain several candidates or rows."""
