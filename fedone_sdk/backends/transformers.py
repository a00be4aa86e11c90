"""Backend for models of the transformers library, masked and causal, run by torch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Literal, TypeVar

from fedone_sdk.backends.base import Answer, LocalBackend, Query
from fedone_sdk.backends.chat import TemplateWarning
from fedone_sdk.backends.checkpoint import (
    chat_template,
    check_device,
    find_checkpoint,
    hash_folder,
    is_causal,
)
from fedone_sdk.backends.fitting import CausalEncoder, ClozeEncoder, read_max_length
from fedone_sdk.backends.torch_model import CausalModel, MaskedModel, TorchModel
from fedone_sdk.budget import Usage
from fedone_sdk.errors import BackendError, MissingExtraError, SpecError
from fedone_sdk.task import Rendered

R = TypeVar("R")


class TransformersBackend(LocalBackend):
    """Backend for a masked model of the RoBERTa family, or a causal model.

    A masked model answers at ``{mask}``, a causal one at the end of the input; the model's
    ``architectures`` decide. Every query is one forward pass with its own padding; a query of more
    than `max_batch` rows is split, sorted by length. The softmax over the vocabulary is computed in
    float32, only at the scored positions.

    The constructor reads the small files, those of a hub model over the network. A worker thread
    loads the weights on the first call that needs them. Code that comes with a model is never run.

    The arguments are keys of ``kind: transformers``. A model needs ``config.json`` and
    ``tokenizer.json``.

    Attributes:
        answers: ``labels``; for a causal model also ``reference`` and ``text`` (greedy).

    Raises:
        MissingExtraError: The extra ``torch`` is not installed.
        SpecError: There is no such model or device, or the model is of another kind.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        revision: str | None = None,
        device: str = "auto",
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        max_batch: int = 256,
        multi_token_labels: bool = False,
    ) -> None:
        if any(find_spec(name) is None for name in ("torch", "transformers")):
            raise MissingExtraError("a model of the transformers library", extra="torch")
        if max_batch < 1:
            raise ValueError(f"max_batch must be at least 1, not {max_batch}")
        self._checkpoint = find_checkpoint(str(model), revision)
        folder = self._checkpoint.folder
        self._causal = is_causal(folder)
        if multi_token_labels and not self._causal:
            raise SpecError(
                "backend.multi_token_labels: must be false for a masked language model, "
                "which has one token at the mask"
            )
        self.answers = frozenset({"labels", "reference", "text"} if self._causal else {"labels"})
        self.max_length = read_max_length(folder, causal=self._causal)
        if device not in ("auto", "cpu"):
            check_device(device)
        self._device, self._dtype, self._max_batch = device, dtype, max_batch
        self._multi_token_labels = multi_token_labels
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="fedone-transformers")
        self._model: TorchModel | None = None
        self._hashing = Lock()
        self._template_warning = TemplateWarning(self._checkpoint.name)
        self._tokenizing = Lock()
        self._encoder: CausalEncoder | ClozeEncoder | None = None

    @cached_property
    def fingerprint(self) -> str:
        """``transformers:<name>:<version>:<dtype>``, the version in 16 hex digits.

        For a hub model it is the commit. For a folder it is the sha256 over configuration,
        tokeniser and weights, which takes about a second per gigabyte. The first call that loads
        the model computes it; reading this property earlier blocks.
        """
        with self._hashing:
            return f"transformers:{self._checkpoint.name}:{self._version}:{self._dtype}"

    @cached_property
    def _version(self) -> str:
        if self._checkpoint.commit is not None:
            return self._checkpoint.commit[:16]
        return hash_folder(self._checkpoint.folder)

    async def score(self, query: Query) -> Answer:
        """Answers one query by one forward pass.

        The text fields of an input that is too long are truncated at their ends, the longest
        first; prompt, template text and mask are not.

        Returns:
            Log-probabilities as float32 numbers, which the wire preserves.
            ``prompt_tokens`` counts each input once, with its longest label word or reference.

        Raises:
            BackendError: An input does not fit the model, or the model cannot be loaded or run.
            LabelWordError: A label word is not one token.
            ValueError: The query has no inputs, no label words, or not one reference per input.
        """
        self.check_query(query)
        return await self._with_model(lambda model: _answer(model, query))

    async def quote(self, query: Query) -> Usage:
        """Return the usage: the tokeniser counts the tokens, without the weights.

        A generated text counts `max_tokens` completion tokens per input.

        Raises:
            BackendError: As `score`, except for failures of the loaded model.
            LabelWordError: As `score`.
            ValueError: As `score`.
        """
        self.check_query(query)
        # Not in the worker thread, where the count would wait for forward passes.
        return await asyncio.to_thread(
            lambda: _count_tokens(
                self._load_encoder(), query, multi_token_labels=self._multi_token_labels
            )
        )

    async def check(self, label_words: tuple[str, ...], form: Rendered = ()) -> None:
        """Check that every label word is one token, and that the model supports the form.

        Raises:
            BackendError: The model cannot be loaded, or does not support the form.
            LabelWordError: A label word is not one token (or none, if it may be several).
        """
        await self._with_model(lambda model: model.label_ids(label_words, form))
        if self._causal and chat_template(self._checkpoint) is not None:
            self._template_warning.check(form)

    async def _with_model(self, call: Callable[[TorchModel], R]) -> R:
        """Call a function with the loaded model, in the worker thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, lambda: call(self._loaded()))

    async def aclose(self) -> None:
        """Stop the worker thread after its pending queries, and free the model."""
        await asyncio.to_thread(self._executor.shutdown)
        self._model = None

    def _load_encoder(self) -> CausalEncoder | ClozeEncoder:
        with self._tokenizing:
            if self._encoder is None:
                file = self._checkpoint.folder / "tokenizer.json"
                self._encoder = (
                    CausalEncoder(file, self.max_length, chat_template(self._checkpoint))
                    if self._causal
                    else ClozeEncoder(file, self.max_length)
                )
            return self._encoder

    def _loaded(self) -> TorchModel:
        if self._model is None:  # There is one worker only.
            self._model = (CausalModel if self._causal else MaskedModel)(
                self._checkpoint,
                self.max_length,
                encoder=self._load_encoder(),
                device=self._device,
                dtype=self._dtype,
                max_batch=self._max_batch,
                multi_token_labels=self._multi_token_labels,
            )
            _ = self.fingerprint  # Hashed in the worker thread, because it blocks.
        return self._model


def _answer(model: TorchModel, query: Query) -> Answer:
    if query.want == "text" and isinstance(model, CausalModel):
        return model.write(query)
    if query.want == "labels":
        labels = model.label_ids(query.label_words, query.inputs[0])
        return model.answer(query, [labels] * len(query.inputs))
    assert isinstance(model, CausalModel)
    references = [model.encoder.continuation(text) for text in query.references]
    if not all(references):
        raise BackendError("a reference text is empty")
    return model.answer(query, [[reference] for reference in references])


def _count_tokens(
    encoder: CausalEncoder | ClozeEncoder, query: Query, *, multi_token_labels: bool = False
) -> Usage:
    """Return the usage of a query, an upper bound on its answer's, without loading the model.

    Each input counts once, with its longest label word or reference except for the last token,
    which the model does not read. A generated text counts `Query.max_tokens` per input.

    Raises:
        BackendError: An input does not fit the model.
        LabelWordError: A label word is not one token and must be.
    """
    if isinstance(encoder, ClozeEncoder):
        for word in query.label_words:
            encoder.label_id(word)
        lengths = [len(encoder.encode(each).ids) for each in query.inputs]
        return Usage(queries=1, requests=1, prompt_tokens=sum(lengths))
    if query.want == "text":
        lengths = [len(encoder.encode(each, reserve=query.max_tokens)) for each in query.inputs]
        written = query.max_tokens * len(query.inputs)
        return Usage(queries=1, requests=1, prompt_tokens=sum(lengths), completion_tokens=written)
    reserves = [max(length - 1, 0) for length in _asked(encoder, query, multi_token_labels)]
    lengths = [
        len(encoder.encode(each, reserve=reserve)) + reserve
        for each, reserve in zip(query.inputs, reserves, strict=True)
    ]
    return Usage(queries=1, requests=1, prompt_tokens=sum(lengths))


def _asked(encoder: CausalEncoder, query: Query, multi_token_labels: bool) -> list[int]:
    """Per input, the tokens of the longest text to score."""
    if query.want == "reference":
        return [len(encoder.continuation(text)) for text in query.references]
    labels = encoder.label_ids(query.label_words, query.inputs[0], several=multi_token_labels)
    return [max(map(len, labels), default=1)] * len(query.inputs)
