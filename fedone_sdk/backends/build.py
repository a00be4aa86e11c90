"""Builds a backend from its keys in a configuration file (`BackendSpec`)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from fedone_sdk.backends.answers import AnswerCache
from fedone_sdk.backends.base import LLMBackend, setting_error
from fedone_sdk.backends.local_models import LOCAL_MODELS
from fedone_sdk.backends.model_client import ModelClient, Watch
from fedone_sdk.budget import FREE, BudgetGuard, Price, known_price
from fedone_sdk.errors import BackendError, MissingExtraError, SpecError
from fedone_sdk.files import user_path
from fedone_sdk.imports import load_object
from fedone_sdk.spec import BackendSpec, RunSpec

__all__ = ["build_adapter", "build_backend", "price_of", "proposer_of"]


def build_backend(
    spec: BackendSpec,
    folder: str | Path = ".",
    *,
    key: str = "backend",
    guard: BudgetGuard | None = None,
    watch: Watch | None = None,
) -> ModelClient:
    """Build the adapter of a spec, and the client that sends queries to it.

    `key` is the spec's key in RUN.yaml, for errors. `ModelClient` gets `guard` and `watch`.
    """
    folder = Path(folder)
    with _errors_of(key, "model"):
        adapter = build_adapter(spec, folder)
    with _errors_of(key, "cache"):
        cache = AnswerCache(None if spec.cache is None else _path(folder, spec.cache))
    return ModelClient(
        adapter,
        cache=cache,
        retry=spec.retry if spec.is_remote else None,
        limits=spec.limits if spec.is_remote else None,
        price=price_of(spec),
        guard=guard,
        watch=watch,
    )


@contextmanager
def _errors_of(key: str, part: str) -> Iterator[None]:
    try:
        yield
    except SpecError as exc:
        prefix = {"backend": "", "spec": f"{part}: "}.get(exc.source, f"{part}: {exc.source}: ")
        raise SpecError([f"{key}.{prefix}{problem}" for problem in exc.problems]) from exc


@asynccontextmanager
async def proposer_of(
    spec: RunSpec, folder: str | Path = ".", backend: LLMBackend | None = None
) -> AsyncIterator[LLMBackend | None]:
    """Open the model that writes new candidates (``prompt.proposer``); None if there is none."""
    proposer = spec.prompt.proposer
    if proposer is None or proposer.backend is None:
        yield None
    elif backend is not None and proposer.backend == spec.backend:
        yield backend
    else:
        async with build_backend(proposer.backend, folder, key="prompt.proposer.backend") as opened:
            yield opened


def build_adapter(spec: BackendSpec, folder: Path) -> LLMBackend:
    """Return the adapter that a spec describes."""
    options, model = spec.adapter_options, spec.model or ""
    if spec.tokenizer is not None:
        options["tokenizer"] = _path(folder, spec.tokenizer)
    match spec.kind:
        case "own":
            return _own(spec, folder)
        case "onnx":
            from fedone_sdk.backends.onnx import OnnxBackend

            if model:
                options["model"] = _path(folder, model)
            return OnnxBackend(**options)
        case "llama_cpp":
            from fedone_sdk.backends.llama_cpp import LlamaCppBackend

            file = _path(folder, model)
            if file.is_file() or model not in LOCAL_MODELS:
                options["model"] = file
            return LlamaCppBackend(**options)
        case "transformers":
            from fedone_sdk.backends.transformers import TransformersBackend

            if (local := _path(folder, model)).is_dir():
                options["model"] = local
            return TransformersBackend(**options)
        case "vllm":
            from fedone_sdk.backends.vllm import VllmBackend

            return VllmBackend(**options)
        case "openai":
            from fedone_sdk.backends.openai import OpenAIBackend

            return OpenAIBackend(**options)


def _own(spec: BackendSpec, folder: Path) -> LLMBackend:
    try:
        make = load_object("object", spec.object or "", folder, group="fedone.backends")
    except SpecError as exc:
        raise SpecError(exc.problems, source="backend") from exc
    try:
        backend = make(**spec.options)
    except (BackendError, MissingExtraError):
        raise
    except Exception as exc:  # User code may raise any exception.
        problem = f"options: {spec.object} raises {type(exc).__name__}: {exc}"
        raise setting_error(problem) from exc
    if not isinstance(backend, LLMBackend):
        kind = type(backend).__name__
        raise setting_error(f"object: {spec.object} returned a {kind}, which is not an LLMBackend")
    return backend


def _path(folder: Path, name: str) -> Path:
    return folder / user_path(name)


def price_of(spec: BackendSpec) -> Price | None:
    """Return the prices of a model; None if they are unknown."""
    if spec.prices is not None:
        prompt = spec.prices.prompt
        uncached, cached = prompt if isinstance(prompt, tuple) else (prompt, None)
        return Price(prompt=uncached, cached=cached, completion=spec.prices.completion)
    if spec.kind == "openai":
        price = known_price(spec.model or "") if spec.base_url is None else None
        return price.in_flex() if price is not None and spec.service_tier else price
    return None if spec.kind == "own" else FREE
