"""Backend for GGUF models, run by llama.cpp in this process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, lru_cache
from hashlib import file_digest
from importlib.util import find_spec
from itertools import accumulate
from math import fsum
from pathlib import Path
from threading import Lock
from typing import NamedTuple, TypeVar

from fedone_sdk.backends.base import Answer, LocalBackend, Query, Want, float32
from fedone_sdk.backends.chat import TemplateWarning
from fedone_sdk.backends.llama_engine import GgufEncoder, LlamaEngine, read_gguf
from fedone_sdk.budget import Usage
from fedone_sdk.errors import BackendError, MissingExtraError, SpecError
from fedone_sdk.task import Rendered

R = TypeVar("R")

_CONTEXT_LENGTH = 4096
"""Default context length in tokens, at most the model's training length."""

_TEMPLATE = "tokenizer.chat_template"
_ARCHITECTURE = "general.architecture"
_FILE_TYPE = "general.file_type"
_NOT_QUANTISED = (0, 1, 32)  # float32, float16, bfloat16


class LlamaCppBackend(LocalBackend):
    """Backend for a causal language model in a GGUF file, on the CPU or on a GPU.

    A query's inputs are evaluated sequentially; the tokens of the prefix that an input shares with
    the previous one are not computed again. Log-probabilities are over the whole vocabulary. An
    answer depends only on its query.

    The constructor reads the file's metadata. A worker thread loads the model on the first call
    that needs it.

    The arguments are keys of ``kind: llama_cpp``; `model` is a file.

    Raises:
        MissingExtraError: The extra ``llama-cpp`` is not installed.
        SpecError: There is no such file, or it is not a causal model in GGUF.
    """

    answers = frozenset[Want]({"labels", "text"})

    def __init__(
        self,
        model: str | Path,
        *,
        max_input_tokens: int | None = None,
        threads: int | None = None,
        gpu_layers: int | None = None,
        multi_token_labels: bool = False,
    ) -> None:
        if find_spec("xllamacpp") is None:
            raise MissingExtraError("a GGUF model", extra="llama-cpp")
        if threads is not None and threads < 1:
            raise ValueError(f"threads must be at least 1, not {threads}")
        self._file = Path(model).expanduser()
        if not self._file.is_file():
            raise SpecError(f"there is no file {str(model)!r}")
        name = read_gguf(self._file, {_ARCHITECTURE}).get(_ARCHITECTURE)
        trained_key = f"{name}.context_length"
        found = read_gguf(self._file, {_TEMPLATE, _FILE_TYPE, trained_key})
        trained = found.get(trained_key)
        if not isinstance(trained, int):
            raise SpecError("holds no language model", source=str(self._file))
        if max_input_tokens is not None and not 16 <= max_input_tokens <= trained:
            raise SpecError(
                f"backend.max_input_tokens: must be from 16 to {trained} for this model, "
                f"not {max_input_tokens}"
            )
        self._has_template = _TEMPLATE in found
        self._exact = found.get(_FILE_TYPE) in _NOT_QUANTISED
        self.max_length = max_input_tokens or min(_CONTEXT_LENGTH, trained)
        self._settings = "".join(
            f":{key}={value}"
            for key, value in (("context", max_input_tokens), ("gpu_layers", gpu_layers))
            if value is not None
        )
        self._threads = threads or os.cpu_count() or 1
        self._gpu_layers = gpu_layers
        self._multi_token_labels = multi_token_labels
        # Tokens are counted while the model computes.
        self._model_thread = ThreadPoolExecutor(1, thread_name_prefix="fedone-llama-cpp")
        self._token_thread = ThreadPoolExecutor(1, thread_name_prefix="fedone-llama-cpp-tokens")
        self._loaded: _Model | None = None
        self._loading = Lock()
        self._template_warning = TemplateWarning(self._file.name)

    @cached_property
    def fingerprint(self) -> str:
        """``llama_cpp:<file name>:<16 hex digits of sha256>``, and settings that change scores.

        The first call that loads the model reads the whole file once.
        """
        with self._file.open("rb") as content:
            digest = file_digest(content, "sha256").hexdigest()
        return f"llama_cpp:{self._file.name}:{digest[:16]}{self._settings}"

    async def score(self, query: Query) -> Answer:
        """Answers one query.

        The text fields of an input that is too long are truncated at their ends, the longest
        first; prompt and template text are not.

        Returns:
            Log-probabilities as float32 numbers, which the wire preserves.
            ``prompt_tokens`` counts each input once, with its longest label word.

        Raises:
            BackendError: An input does not fit the model, or the model cannot be loaded or run.
            LabelWordError: A label word is not one token.
            ValueError: The query has no inputs, or no label words.
        """
        self.check_query(query)
        return await self._in(self._model_thread, lambda model: model.answer(query))

    async def check(self, label_words: tuple[str, ...], form: Rendered = ()) -> None:
        """Check that every label word is one token, and that the model supports the form.

        Raises:
            BackendError: The model cannot be loaded, or does not support the form.
            LabelWordError: A label word is not one token (or none, where it may be several).
        """
        await self._in(self._token_thread, lambda model: model.check(label_words, form))
        if self._has_template:
            self._template_warning.check(form)

    async def quote(self, query: Query) -> Usage:
        """Return the exact usage: the tokens of the inputs are counted.

        Raises:
            BackendError: As `score`.
        """
        return await self._in(self._token_thread, lambda model: model.count(query))

    async def aclose(self) -> None:
        """Stop the worker threads after their pending queries, and free the model."""
        for thread in (self._token_thread, self._model_thread):
            await asyncio.to_thread(thread.shutdown)
        self._loaded = None

    async def _in(self, thread: ThreadPoolExecutor, call: Callable[[_Model], R]) -> R:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(thread, lambda: call(self._model()))

    def _model(self) -> _Model:
        with self._loading:
            if self._loaded is None:
                _ = self.fingerprint  # Hashed in the worker thread, because it blocks.
                engine = LlamaEngine(
                    self._file,
                    context_length=self.max_length,
                    threads=self._threads,
                    gpu_layers=self._gpu_layers,
                    exact=self._exact,
                )
                self._loaded = _Model(
                    engine,
                    GgufEncoder(engine, has_template=self._has_template),
                    multi_token_labels=self._multi_token_labels,
                )
            return self._loaded


class _Plan(NamedTuple):
    """The token ids of a query: of each input, and of each label word."""

    starts: tuple[tuple[int, ...], ...]
    labels: tuple[tuple[int, ...], ...]


class _Model:
    """The loaded model and its tokeniser. All methods block."""

    def __init__(
        self, engine: LlamaEngine, encoder: GgufEncoder, *, multi_token_labels: bool
    ) -> None:
        self._engine, self._encoder = engine, encoder
        self._multi_token_labels = multi_token_labels
        # A query is tokenised once for its quote and its score.
        self._plan = lru_cache(maxsize=16)(self._planned)

    def check(self, label_words: Sequence[str], form: Rendered) -> None:
        """Raise an error if the model does not support label words or form."""
        self._label_ids(label_words, form)
        if form:
            self._encoder.encode(form, reserve=1)

    def count(self, query: Query) -> Usage:
        """Return the usage of a query; an upper bound for generated texts."""
        plan = self._plan(query.inputs, query.label_words, query.max_tokens)
        return Usage(
            queries=1,
            requests=1,
            prompt_tokens=_num_tokens(plan),
            completion_tokens=query.max_tokens * len(query.inputs),
        )

    def answer(self, query: Query) -> Answer:
        """Answers a query."""
        plan = self._plan(query.inputs, query.label_words, query.max_tokens)
        usage = Usage(requests=1, prompt_tokens=_num_tokens(plan))
        if query.want == "text":
            written = self._engine.write(plan.starts, query.max_tokens)
            completion = sum(one.num_tokens for one in written)
            return Answer(
                log_probs=((),) * len(written),
                texts=tuple(one.text for one in written),
                usage=usage + Usage(completion_tokens=completion),
            )
        return Answer(log_probs=self._label_log_probs(plan), usage=usage)

    def _label_log_probs(self, plan: _Plan) -> tuple[tuple[float, ...], ...]:
        # The tokens between an input and each token of a label word; none for one-token words.
        heads = sorted({label[:end] for label in plan.labels for end in range(len(label))})
        asked = {
            head: [
                label[len(head)]
                for label in plan.labels
                if label[: len(head)] == head and len(label) > len(head)
            ]
            for head in heads
        }
        found = self._engine.next_log_probs(
            [(*start, *head) for start in plan.starts for head in heads],
            [asked[head] for _ in plan.starts for head in heads],
        )
        rows = []
        for at in range(0, len(found), len(heads)):
            known = {
                (*head, token): value
                for head, values in zip(heads, found[at : at + len(heads)], strict=True)
                for token, value in zip(asked[head], values, strict=True)
            }
            rows.append(
                tuple(
                    float32(fsum(known[start] for start in _beginnings(label)))
                    for label in plan.labels
                )
            )
        return tuple(rows)

    def _planned(
        self, inputs: tuple[Rendered, ...], label_words: tuple[str, ...], max_tokens: int
    ) -> _Plan:
        labels = self._label_ids(label_words, inputs[0])
        reserve = max(max_tokens, *map(len, labels), 1)
        if reserve >= self._engine.context_length:
            raise BackendError(
                f"max_tokens must be less than {self._engine.context_length} for this model, "
                f"not {max_tokens}"
            )
        return _Plan(
            tuple(tuple(self._encoder.encode(parts, reserve=reserve)) for parts in inputs), labels
        )

    def _label_ids(self, label_words: Sequence[str], like: Rendered) -> tuple[tuple[int, ...], ...]:
        several = self._multi_token_labels
        return tuple(map(tuple, self._encoder.label_ids(label_words, like, several=several)))


def _beginnings(label: tuple[int, ...]) -> list[tuple[int, ...]]:
    return list(accumulate(((token,) for token in label), lambda head, more: head + more))


def _num_tokens(plan: _Plan) -> int:
    longest = max(map(len, plan.labels), default=1)
    return sum(len(start) + longest - 1 for start in plan.starts)
