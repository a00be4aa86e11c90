"""Backend for GGUF models, run by llama.cpp in this process."""

from __future__ import annotations

import os
from functools import cached_property
from hashlib import file_digest
from importlib.util import find_spec
from math import fsum
from pathlib import Path
from typing import NamedTuple

from fedone_sdk.backends import base
from fedone_sdk.backends.base import Answer, LocalBackend, Query
from fedone_sdk.backends.llama_engine import GgufEncoder, LlamaEngine, read_gguf
from fedone_sdk.backends.local_models import gguf_file
from fedone_sdk.budget import Usage
from fedone_sdk.errors import MissingExtraError, SpecError

_CONTEXT_LENGTH = 4096
"""Default context length in tokens; less if the model was trained with less."""

_NOT_QUANTISED = (0, 1, 32)  # float32, float16, bfloat16


class _Plan(NamedTuple):
    inputs: list[list[int]]  # Token ids.
    labels: list[tuple[int, ...]]  # Token ids of each label word.
    worst: Usage  # Upper bound; exact if no text is generated.


class LlamaCppBackend(LocalBackend[_Plan, GgufEncoder, LlamaEngine]):
    """Backend for a causal language model in a GGUF file, on the CPU or on a GPU.

    The inputs of a query are computed one after the other. A prefix that two successive inputs
    share is computed once. Log-probabilities are over the whole vocabulary. An answer depends only
    on its query, not on earlier queries.

    The constructor reads the file's metadata. A worker thread loads the model on its first use.

    The arguments are keys of ``kind: llama_cpp``; `model` is a file, or a name that
    ``fedone models`` lists.
    """

    answers = frozenset[base.Want]({"labels", "text"})
    takes_schema = True

    def __init__(
        self,
        model: str | Path,
        *,
        max_input_tokens: int | None = None,
        threads: int | None = None,
        multi_token_labels: bool = False,
    ) -> None:
        if find_spec("xllamacpp") is None:
            raise MissingExtraError("a GGUF model", extra="llama-cpp")
        self._file = gguf_file(model)
        metadata = read_gguf(self._file)
        trained = metadata.get(f"{metadata.get('general.architecture')}.context_length")
        if not isinstance(trained, int):
            raise SpecError("contains no language model", source=str(self._file))
        if max_input_tokens is not None and not 16 <= max_input_tokens <= trained:
            raise base.setting_error(
                f"max_input_tokens: must be from 16 to {trained} for this model, not "
                f"{max_input_tokens}"
            )
        self._has_template = "tokenizer.chat_template" in metadata
        self._exact = metadata.get("general.file_type") in _NOT_QUANTISED
        self.max_length = max_input_tokens or min(_CONTEXT_LENGTH, trained)
        self._settings = "" if max_input_tokens is None else f":context={max_input_tokens}"
        self._threads = threads
        self._multi_token_labels = multi_token_labels
        super().__init__("llama-cpp", self._file.name, has_template=self._has_template)

    @cached_property
    def fingerprint(self) -> str:
        """``llama_cpp:<file name>:<16 hex digits of sha256>``, and settings that change scores."""
        with self._file.open("rb") as content:
            digest = file_digest(content, "sha256").hexdigest()
        return f"llama_cpp:{self._file.name}:{digest[:16]}{self._settings}"

    def _load_encoder(self) -> GgufEncoder:
        return GgufEncoder(
            self._loaded(),
            has_template=self._has_template,
            multi_token_labels=self._multi_token_labels,
        )

    def _load_model(self) -> LlamaEngine:
        threads = self._threads or os.cpu_count() or 1
        return LlamaEngine(
            self._file, context_length=self.max_length, threads=threads, exact=self._exact
        )

    def _plan(self, query: Query) -> _Plan:
        encoder = self._loaded_encoder()
        labels = encoder.label_ids(query.label_words, query.inputs[0])
        longest = max(map(len, labels), default=1)
        if query.want == "text":
            inputs = encoder.encode_for_text(query)
        else:
            inputs = [encoder.encode(parts, reserve=longest) for parts in query.inputs]
        num_tokens = sum(len(ids) + longest - 1 for ids in inputs)
        worst = base.one_query(num_tokens, query.max_tokens * len(inputs))
        return _Plan(inputs, [tuple(label) for label in labels], worst)

    def _run(self, query: Query, plan: _Plan) -> Answer:
        engine = self._loaded()
        if query.want != "text":
            usage = plan.worst.without_queries()
            return Answer(log_probs=_label_log_probs(engine, plan), usage=usage)
        written = engine.write(plan.inputs, query.max_tokens, query.stop, query.schema)
        usage = Usage(
            requests=1,
            prompt_tokens=plan.worst.prompt_tokens,
            completion_tokens=sum(each.num_tokens for each in written),
        )
        texts = tuple(each.text for each in written)
        return Answer(log_probs=((),) * len(written), texts=texts, usage=usage)


def _label_log_probs(engine: LlamaEngine, plan: _Plan) -> tuple[tuple[float, ...], ...]:
    # For each beginning of a label word: the tokens that may come next.
    following: dict[tuple[int, ...], list[int]] = {}
    for label in plan.labels:
        for at, token in enumerate(label):
            following.setdefault(label[:at], []).append(token)
    beginnings = sorted(following)
    prompts = [(*ids, *beginning) for ids in plan.inputs for beginning in beginnings]
    wanted = [following[beginning] for beginning in beginnings] * len(plan.inputs)
    shown = iter(engine.next_log_probs(prompts, wanted))
    rows = []
    for _ in plan.inputs:
        after = {beginning: next(shown) for beginning in beginnings}
        row = (
            fsum(after[label[:at]][label[at]] for at in range(len(label))) for label in plan.labels
        )
        rows.append(tuple(map(base.float32, row)))
    return tuple(rows)
