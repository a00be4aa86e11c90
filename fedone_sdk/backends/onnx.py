"""Backend for masked language models of the RoBERTa family, run by onnxruntime on the CPU."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from hashlib import sha256
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from fedone_sdk import assets
from fedone_sdk.backends.base import Answer, LocalBackend, Query, one_query
from fedone_sdk.backends.encoders import Cloze, ClozeEncoder, read_max_length
from fedone_sdk.budget import Usage
from fedone_sdk.errors import BackendError, MissingExtraError, SpecError
from fedone_sdk.files import user_path

MODEL_FILES = ("model.int8.onnx", "model.onnx")
"""File names of a model, in order of preference."""

_GROUP = 8
"""Maximum inputs per forward pass."""


class _Plan(NamedTuple):
    clozes: list[Cloze]
    labels: list[int]  # The token id of each label word.
    worst: Usage  # The usage, which is known before the query runs.


class OnnxBackend(LocalBackend[_Plan, ClozeEncoder, "_MaskedModel"]):
    """Backend for a local masked language model, which predicts the word at ``{mask}``.

    The inputs of a query are sorted by length and run in batches of `_GROUP`, to reduce padding. A
    score of an int8 model depends on the other inputs of its batch, so a batch never contains
    inputs of several queries. Each pass runs on one core, so scores do not depend on `threads`.

    The constructor checks the files. The first call that needs them loads them in a worker thread.

    The arguments are keys of ``kind: onnx``. The model has the inputs ``input_ids``,
    ``attention_mask`` and ``mask_index``, and the output ``logits`` at the mask;
    ``tokenizer_config.json`` or ``config.json`` has the maximum length.
    """

    apart = False

    def __init__(self, model: str | Path | None = None, *, threads: int | None = None) -> None:
        if any(find_spec(name) is None for name in ("numpy", "onnxruntime", "tokenizers")):
            raise MissingExtraError("a local ONNX model", extra="local")
        folder = assets.path("roberta_mini") if model is None else user_path(model)
        self._name = folder.resolve().name
        self._model_file, self._tokenizer_file = _files(folder)
        self.max_length = read_max_length(folder)
        super().__init__("onnx", self._name, threads=threads or min(4, os.cpu_count() or 1))

    @cached_property
    def fingerprint(self) -> str:
        """``onnx:<folder name>:<16 hex digits of sha256>`` of the model and the tokeniser."""
        content = self._model_file.read_bytes() + self._tokenizer_file.read_bytes()
        return f"onnx:{self._name}:{sha256(content).hexdigest()[:16]}"

    def _load_encoder(self) -> ClozeEncoder:
        return ClozeEncoder(self._tokenizer_file, self.max_length)

    def _load_model(self) -> _MaskedModel:
        return _MaskedModel(self._model_file, self._loaded_encoder().pad_id)

    def _plan(self, query: Query) -> _Plan:
        encoder = self._loaded_encoder()
        labels = [token for (token,) in encoder.label_ids(query.label_words)]
        clozes = [encoder.encode(parts) for parts in query.inputs]
        num_tokens = sum(len(cloze.ids) for cloze in clozes)
        return _Plan(clozes, labels, one_query(num_tokens))

    async def shortened(self, query: Query) -> list[list[int]]:
        # The fingerprint does not name the maximum length, so the ids identify a shortened input.
        return [cloze.ids for cloze in (await self._prepared(query)).clozes]

    def _run(self, query: Query, plan: _Plan) -> Answer:
        log_probs = self._loaded().log_probs(plan.clozes, plan.labels)
        return Answer(log_probs=log_probs, usage=plan.worst.without_queries())


class _MaskedModel:
    """The loaded model. All methods block and are thread-safe."""

    def __init__(self, model_file: Path, pad_id: int) -> None:
        self._pad_id = pad_id
        # Official builds from 1.29 send usage data to Microsoft unless the variable is set first.
        os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
        onnxruntime = import_module("onnxruntime")
        options = onnxruntime.SessionOptions()
        # One core per pass, because a sum over several threads rounds differently.
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 4  # No logs on stderr, as failures raise exceptions.
        try:
            self._session = onnxruntime.InferenceSession(
                str(model_file), options, providers=["CPUExecutionProvider"]
            )
        except Exception as exc:  # The library's errors have no common base class.
            raise BackendError(f"{model_file.parent}: cannot load the model: {exc}") from exc

    def log_probs(
        self, clozes: Sequence[Cloze], label_ids: Sequence[int]
    ) -> tuple[tuple[float, ...], ...]:
        """Return the labels' log-probabilities of the whole softmax: (clozes, labels), nats."""
        rows: dict[int, tuple[float, ...]] = {}
        order = sorted(range(len(clozes)), key=lambda at: len(clozes[at].ids))
        for start in range(0, len(order), _GROUP):
            group = order[start : start + _GROUP]
            scores = self._one_pass([clozes[at] for at in group], label_ids)
            rows.update(zip(group, scores, strict=True))
        return tuple(rows[at] for at in range(len(clozes)))

    def _one_pass(
        self, clozes: Sequence[Cloze], label_ids: Sequence[int]
    ) -> list[tuple[float, ...]]:
        import numpy as np

        shape = (len(clozes), max(len(cloze.ids) for cloze in clozes))
        input_ids = np.full(shape, self._pad_id, dtype=np.int64)
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
            (output,) = self._session.run(["logits"], feed)
        except Exception as exc:  # The library's errors have no common base class.
            raise BackendError(f"onnxruntime failed: {exc}") from exc
        logits = output.astype(np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        log_total = np.log(np.exp(logits).sum(axis=1, keepdims=True))
        rows = (logits[:, list(label_ids)] - log_total).astype(np.float32).tolist()
        return [tuple(row) for row in rows]


def _files(folder: Path) -> tuple[Path, Path]:
    if not folder.is_dir():
        raise SpecError("there is no such model folder", source=str(folder))
    models = [folder / name for name in MODEL_FILES if (folder / name).is_file()]
    if not models:
        raise SpecError(f"needs {' or '.join(MODEL_FILES)}", source=str(folder))
    tokenizer = folder / "tokenizer.json"
    if not tokenizer.is_file():
        raise SpecError("needs tokenizer.json", source=str(folder))
    return models[0], tokenizer
