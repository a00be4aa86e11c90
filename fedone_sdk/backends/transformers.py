"""Backend for models of the transformers library, masked and causal, run by torch."""

from __future__ import annotations

from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Literal

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
from fedone_sdk.backends.torch_model import Encoder, Plan, TorchModel, plan_of
from fedone_sdk.errors import MissingExtraError, SpecError
from fedone_sdk.task import Rendered


class TransformersBackend(LocalBackend[Plan]):
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
        super().__init__("transformers")
        self._model: TorchModel | None = None
        self._hashing = Lock()
        self._template_warning = TemplateWarning(self._checkpoint.name)
        self._encoder: Encoder | None = None

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

    async def check(self, label_words: tuple[str, ...], form: Rendered = ()) -> None:
        """Check that every label word is one token, and that the model supports the form.

        Raises:
            BackendError: The model cannot be loaded, or does not support the form.
            LabelWordError: A label word is not one token (or none, if it may be several).
        """
        several = self._multi_token_labels
        await self._in(
            self._token_thread,
            lambda: self._loaded_encoder().label_ids(label_words, form, several=several),
        )
        await self._in(self._model_threads, self._loaded)
        if self._causal and chat_template(self._checkpoint) is not None:
            self._template_warning.check(form)

    async def aclose(self) -> None:
        """Stop the threads after their pending queries, and free the model."""
        await super().aclose()
        self._model = None

    def _plan(self, query: Query) -> Plan:
        return plan_of(self._loaded_encoder(), query, several=self._multi_token_labels)

    def _run(self, query: Query, plan: Plan) -> Answer:
        model = self._loaded()
        return model.write(plan, query.max_tokens) if query.want == "text" else model.score(plan)

    def _loaded_encoder(self) -> Encoder:
        if self._encoder is None:  # Loaded by the token thread, before any query is answered.
            file = self._checkpoint.folder / "tokenizer.json"
            self._encoder = (
                CausalEncoder(file, self.max_length, chat_template(self._checkpoint))
                if self._causal
                else ClozeEncoder(file, self.max_length)
            )
        return self._encoder

    def _loaded(self) -> TorchModel:
        if self._model is None:  # There is one worker only.
            self._model = TorchModel(
                self._checkpoint,
                self._loaded_encoder(),
                device=self._device,
                dtype=self._dtype,
                max_batch=self._max_batch,
            )
            _ = self.fingerprint  # Hashed in the worker thread, because it blocks.
        return self._model
