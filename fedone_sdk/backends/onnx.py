"""Masked language models of the RoBERTa family, run by onnxruntime on this machine's CPU."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from hashlib import sha256
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, TypeVar

from fedone_sdk import assets
from fedone_sdk.backends.base import Answer, LLMBackend, Query
from fedone_sdk.budget import Usage
from fedone_sdk.errors import BackendError, LabelWordError, MissingExtraError, SpecError
from fedone_sdk.task import Part, Rendered

__all__ = ["OnnxBackend"]

A = TypeVar("A")
R = TypeVar("R")

_MODEL_FILES = ("model.int8.onnx", "model.onnx")
_NUM_SPECIAL = 3  # <s>, <mask>, </s>


class OnnxBackend(LLMBackend):
    """Asks a local masked language model for the words at ``{mask}``.

    Every query is one forward pass with its own padding. An int8 model's scores depend on what
    else is in the batch, so queries are never merged, split or reordered; and each pass runs on
    one core, so scores do not depend on `threads` either.

    The files are checked here, and loaded in a worker thread by the first call that needs them.

    Attributes:
        max_length: Tokens that the model takes per input, special tokens included.

    Args:
        model: A folder with ``model.int8.onnx`` or ``model.onnx`` (inputs ``input_ids``,
            ``attention_mask``, ``mask_index``; output ``logits`` at the mask),
            ``tokenizer.json``, and ``tokenizer_config.json`` or ``config.json`` for the maximum
            length. None is the embedded model.
        threads: Queries that run at the same time; by default one per core, at most 4.

    Raises:
        MissingExtraError: The extra ``local`` is not installed.
        SpecError: The folder does not hold such a model.
    """

    bounds = frozenset(
        {"queries", "requests", "tokens", "prompt_tokens", "completion_tokens", "usd"}
    )

    def __init__(self, model: str | Path | None = None, *, threads: int | None = None) -> None:
        if any(find_spec(name) is None for name in ("numpy", "onnxruntime", "tokenizers")):
            raise MissingExtraError("a local ONNX model", extra="local")
        if threads is None:
            threads = min(4, os.cpu_count() or 1)
        if threads < 1:
            raise ValueError(f"threads must be at least 1, not {threads}")
        folder = assets.path("roberta_mini") if model is None else Path(model).expanduser()
        self._name = folder.resolve().name
        self._model_file, self._tokenizer_file = _files(folder)
        self.max_length = _max_length(folder)
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="fedone-onnx")
        self._model: _MaskedModel | None = None
        self._loading = Lock()

    @cached_property
    def fingerprint(self) -> str:
        """``onnx:<folder name>:<sha256>``, the first 16 hex digits over model and tokenizer."""
        digest = sha256(self._model_file.read_bytes())
        digest.update(self._tokenizer_file.read_bytes())
        return f"onnx:{self._name}:{digest.hexdigest()[:16]}"

    async def score(self, query: Query) -> Answer:
        """Answers one query by one forward pass.

        A too long input loses the ends of its text fields, the longest field first; prompt,
        template text and mask stay whole.

        Returns:
            Log-probabilities as float32 numbers, so that the wire does not change them.

        Raises:
            BackendError: An input has not exactly one mask, or is too long without its fields;
                or the model cannot be loaded or run.
            LabelWordError: A label word is not one token.
            ValueError: The query has no inputs.
        """
        if not query.inputs:
            raise ValueError("a query needs at least one input")
        return await self._in_worker(self._score, query)

    async def check(self, label_words: tuple[str, ...]) -> None:
        """Checks that every label word, with its leading space as given, is one token.

        Raises:
            BackendError: The model cannot be loaded.
            LabelWordError: A label word is not one token.
        """
        await self._in_worker(self._label_ids, label_words)

    def worst_case(self, batch_size: int) -> Usage:
        """One query of `batch_size` inputs of the maximum length; a local model costs no money."""
        return Usage(queries=1, requests=1, prompt_tokens=self.max_length * batch_size)

    async def aclose(self) -> None:
        """Ends the worker threads, after the queries that they hold."""
        await asyncio.to_thread(self._executor.shutdown)

    async def _in_worker(self, call: Callable[[A], R], argument: A) -> R:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, call, argument)

    def _loaded(self) -> _MaskedModel:
        with self._loading:
            if self._model is None:
                self._model = _MaskedModel(self._model_file, self._tokenizer_file, self.max_length)
                _ = self.fingerprint  # Hashed here rather than on the event loop.
            return self._model

    def _label_ids(self, label_words: Sequence[str]) -> list[int]:
        model = self._loaded()
        return [model.label_id(word) for word in label_words]

    def _score(self, query: Query) -> Answer:
        label_ids = self._label_ids(query.label_words)
        model = self._loaded()
        clozes = [model.encode(rendered) for rendered in query.inputs]
        return Answer(
            log_probs=model.log_probs(clozes, label_ids),
            usage=Usage(requests=1, prompt_tokens=sum(len(cloze.ids) for cloze in clozes)),
        )


class _Cloze(NamedTuple):
    """An input as the model takes it: token ids, and where the mask is among them."""

    ids: list[int]
    mask_index: int


class _MaskedModel:
    """The loaded model: everything that blocks. Safe to call from several threads at once."""

    def __init__(self, model_file: Path, tokenizer_file: Path, max_length: int) -> None:
        onnxruntime, tokenizers = import_module("onnxruntime"), import_module("tokenizers")
        options = onnxruntime.SessionOptions()
        # One core per pass: a sum split over a varying number of threads rounds differently.
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 4  # Failures come as exceptions; stderr is not ours.
        try:
            self._session = onnxruntime.InferenceSession(
                str(model_file), options, providers=["CPUExecutionProvider"]
            )
            self._tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_file))
        except Exception as exc:  # Neither library has a base class of its own.
            raise BackendError(f"{model_file.parent}: cannot load the model: {exc}") from exc
        self._max_length = max_length
        special = [self._tokenizer.token_to_id(name) for name in ("<s>", "<pad>", "</s>", "<mask>")]
        if None in special:
            raise BackendError(f"{tokenizer_file}: needs the tokens <s>, <pad>, </s> and <mask>")
        self._start, self._pad, self._end, self._mask = special
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # "<mask>" in somebody's text is text.
        self._tokenizer.encode_special_tokens = True
        # Special tokens are placed here by id; what is left to post-process is that offsets must
        # cover the spaces too, for cutting.
        self._tokenizer.post_processor = tokenizers.processors.ByteLevel(trim_offsets=False)

    def _tokenise(self, text: str) -> Any:
        # Text by text: `encode_batch` is no faster on short texts, and starts a thread pool of its
        # own that ignores `threads`.
        try:
            return self._tokenizer.encode(text, add_special_tokens=False)
        except TypeError as exc:
            raise BackendError("an input is not valid Unicode (it has a lone surrogate)") from exc

    def label_id(self, word: str) -> int:
        """The token id of a label word, or `LabelWordError`."""
        encoding = self._tokenise(word)
        if len(encoding.ids) != 1:
            raise LabelWordError(word, encoding.tokens)
        return int(encoding.ids[0])

    def encode(self, parts: Rendered) -> _Cloze:
        """Tokenises a rendered input, and shortens its fields until it fits.

        Raises:
            BackendError: There is not exactly one mask, or the rest is too long already.
        """
        num_masks = sum(part.kind == "mask" for part in parts)
        if num_masks != 1:
            raise BackendError(
                f"the template needs {{mask}} exactly once for a masked language model; "
                f"this input has it {num_masks} times"
            )
        mask = next(index for index, part in enumerate(parts) if part.kind == "mask")
        while True:
            # Each side is one text: tokens may span two parts. <mask> swallows the space before it
            # (`lstrip`), as it did in the model's training.
            before = self._tokenise("".join(part.text for part in parts[:mask]).rstrip())
            after = self._tokenise("".join(part.text for part in parts[mask + 1 :]))
            length = len(before.ids) + len(after.ids) + _NUM_SPECIAL
            if length <= self._max_length:
                ids = [self._start, *before.ids, self._mask, *after.ids, self._end]
                return _Cloze(ids, 1 + len(before.ids))
            starts = [
                *_token_starts(parts[:mask], before.offsets),
                [],
                *_token_starts(parts[mask + 1 :], after.offsets),
            ]
            if not any(starts):
                raise BackendError(
                    f"the input is {length} tokens without its text fields, "
                    f"the model takes {self._max_length}: shorten the prompt or the template"
                )
            # Cutting may change how the border is tokenised, so measure again. It ends: each turn
            # removes a character or more.
            parts = _shorten(parts, starts, length - self._max_length)

    def log_probs(
        self, clozes: Sequence[_Cloze], label_ids: Sequence[int]
    ) -> tuple[tuple[float, ...], ...]:
        """One forward pass.

        Returns:
            Shape (len(clozes), len(label_ids)), nats over the whole vocabulary, float32 numbers.
        """
        import numpy as np

        shape = (len(clozes), max(len(cloze.ids) for cloze in clozes))
        input_ids = np.full(shape, self._pad, dtype=np.int64)
        attention_mask = np.zeros(shape, dtype=np.int64)
        for row, cloze in enumerate(clozes):
            input_ids[row, : len(cloze.ids)] = cloze.ids
            attention_mask[row, : len(cloze.ids)] = 1
        feed = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "mask_index": np.array([cloze.mask_index for cloze in clozes], dtype=np.int64),
        }
        try:
            (found,) = self._session.run(["logits"], feed)
        except Exception as exc:  # As above: no base class.
            raise BackendError(f"onnxruntime failed: {exc}") from exc
        logits = found.astype(np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        log_total = np.log(np.exp(logits).sum(axis=1, keepdims=True))
        rows = (logits[:, list(label_ids)] - log_total).astype(np.float32).tolist()
        return tuple(tuple(row) for row in rows)


def _token_starts(parts: Sequence[Part], offsets: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Where the tokens of each part start, counted from the part's start; only fields have any."""
    starts: list[list[int]] = []
    end = 0
    for part in parts:
        begin, end = end, end + len(part.text)
        starts.append(
            [max(a - begin, 0) for a, b in offsets if a < end and b > begin]
            if part.kind == "field"
            else []
        )
    return starts


def _shorten(parts: Rendered, starts: Sequence[Sequence[int]], excess: int) -> Rendered:
    """Cuts `excess` tokens off the ends of the fields, each from the field that is longest then."""
    keep = [len(part_starts) for part_starts in starts]
    for _ in range(min(excess, sum(keep))):
        keep[keep.index(max(keep))] -= 1
    return tuple(
        part._replace(text=part.text[: part_starts[kept]]) if kept < len(part_starts) else part
        for part, part_starts, kept in zip(parts, starts, keep, strict=True)
    )


def _files(folder: Path) -> tuple[Path, Path]:
    if not folder.is_dir():
        raise SpecError("there is no such model folder", source=str(folder))
    models = [folder / name for name in _MODEL_FILES if (folder / name).is_file()]
    if not models:
        raise SpecError(f"needs {' or '.join(_MODEL_FILES)}", source=str(folder))
    tokenizer = folder / "tokenizer.json"
    if not tokenizer.is_file():
        raise SpecError("needs tokenizer.json", source=str(folder))
    return models[0], tokenizer


def _max_length(folder: Path) -> int:
    limits = []
    stated = _json(folder / "tokenizer_config.json").get("model_max_length")
    if isinstance(stated, int) and stated < 2**31:  # transformers writes 1e30 for "unknown"
        limits.append(stated)
    config = _json(folder / "config.json")
    positions = config.get("max_position_embeddings")
    if isinstance(positions, int):
        # RoBERTa numbers positions from pad_token_id + 1.
        limits.append(positions - config.get("pad_token_id", 1) - 1)
    if not limits:
        raise SpecError(
            "the maximum length is unknown: needs tokenizer_config.json with model_max_length, "
            "or config.json with max_position_embeddings",
            source=str(folder),
        )
    return int(min(limits))


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as exc:
        raise SpecError(f"is not JSON: {exc}", source=str(file)) from exc
    return content if isinstance(content, dict) else {}
