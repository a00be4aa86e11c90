"""Backend for models of the transformers library, masked and causal, run by torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from math import fsum
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fedone_sdk.backends.base import Answer, LocalBackend, Query, float32
from fedone_sdk.backends.chat import TemplateWarning
from fedone_sdk.backends.checkpoint import (
    Checkpoint,
    chat_template,
    find_checkpoint,
    first_line,
    hash_folder,
    is_causal,
    load_module,
)
from fedone_sdk.backends.fitting import CausalEncoder, ClozeEncoder, read_max_length
from fedone_sdk.budget import Usage
from fedone_sdk.errors import BackendError, MissingExtraError, SpecError
from fedone_sdk.task import Rendered

Encoder = ClozeEncoder | CausalEncoder


class Row(NamedTuple):
    """Token ids, and the (position, next token) pairs to score."""

    ids: list[int]
    asked: list[tuple[int, int]]


class Plan(NamedTuple):
    """The forward passes of a query. It needs the tokeniser only, not the weights.

    Attributes:
        rows: The sequences; for a text to generate, the inputs.
        spans: Per input and text to score, its row, and the start and end of its tokens in the
            row's `asked`.
        worst: Its usage counts each input with its longest text except for the last token, which
            the model does not read; of a text to generate, all tokens.
    """

    rows: list[Row]
    spans: list[list[tuple[int, int, int]]]
    worst: Usage

    @property
    def paid(self) -> Usage:
        """The usage of the inputs."""
        return Usage(requests=1, prompt_tokens=self.worst.prompt_tokens)


class TransformersBackend(LocalBackend[Plan, Encoder, "TorchModel"]):
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
    """

    def __init__(
        self,
        model: str | Path,
        *,
        device: str = "auto",
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        max_batch: int = 256,
        multi_token_labels: bool = False,
    ) -> None:
        if any(find_spec(name) is None for name in ("torch", "transformers")):
            raise MissingExtraError("a model of the transformers library", extra="torch")
        if max_batch < 1:
            raise ValueError(f"max_batch must be at least 1, not {max_batch}")
        self._checkpoint = find_checkpoint(str(model))
        folder = self._checkpoint.folder
        self._causal = is_causal(folder)
        if multi_token_labels and not self._causal:
            raise SpecError(
                "backend.multi_token_labels: must be false for a masked language model, "
                "which has one token at the mask"
            )
        self.answers = frozenset({"labels", "reference", "text"} if self._causal else {"labels"})
        self.max_length = read_max_length(folder, causal=self._causal)
        self._device, self._dtype, self._max_batch = device, dtype, max_batch
        super().__init__("transformers", several=multi_token_labels)
        self._template_warning = TemplateWarning(self._checkpoint.name)

    @cached_property
    def fingerprint(self) -> str:
        """``transformers:<name>:<version>:<dtype>``, the version in 16 hex digits.

        For a hub model it is the commit. For a folder it is the sha256 over configuration,
        tokeniser and weights, which takes about a second per gigabyte. The first call that loads
        the model computes it; reading this property earlier blocks.
        """
        checkpoint = self._checkpoint
        version = (checkpoint.commit or hash_folder(checkpoint.folder))[:16]
        return f"transformers:{checkpoint.name}:{version}:{self._dtype}"

    async def check(self, label_words: tuple[str, ...], form: Rendered = ()) -> None:
        """Check that every label word is one token, and that the model supports the form."""
        await super().check(label_words, form)
        if self._causal and chat_template(self._checkpoint) is not None:
            self._template_warning.check(form)

    def _plan(self, query: Query) -> Plan:
        return plan_of(self._loaded_encoder(), query, several=self._several)

    def _run(self, query: Query, plan: Plan) -> Answer:
        model = self._loaded()
        return model.write(plan, query.max_tokens) if query.want == "text" else model.score(plan)

    def _load_encoder(self) -> Encoder:
        file = self._checkpoint.folder / "tokenizer.json"
        if not self._causal:
            return ClozeEncoder(file, self.max_length)
        return CausalEncoder(file, self.max_length, chat_template(self._checkpoint))

    def _load_model(self) -> TorchModel:
        return TorchModel(
            self._checkpoint,
            self._loaded_encoder(),
            device=self._device,
            dtype=self._dtype,
            max_batch=self._max_batch,
        )


def plan_of(encoder: Encoder, query: Query, *, several: bool = False) -> Plan:
    """Plan the forward passes of a query."""
    if isinstance(encoder, ClozeEncoder):
        labels = [token for (token,) in encoder.label_ids(query.label_words)]
        clozes = [encoder.encode(parts) for parts in query.inputs]
        rows = [Row(one.ids, [(one.mask_index, token) for token in labels]) for one in clozes]
        spans = [[(row, at, at + 1) for at in range(len(labels))] for row in range(len(rows))]
        return Plan(rows, spans, _usage(sum(len(row.ids) for row in rows)))
    if query.want == "text":
        if query.max_tokens < 1:
            raise BackendError("a query for a text needs max_tokens of at least 1")
        most = query.max_tokens
        rows = [Row(encoder.encode(parts, reserve=most), []) for parts in query.inputs]
        return Plan(rows, [], _usage(sum(len(row.ids) for row in rows), most * len(rows)))
    texts = encoder.endings(query, several=several)
    rows, spans, num_tokens = [], [], 0
    for parts, follow in zip(query.inputs, texts, strict=True):
        # The last token of a text is scored, but not part of the input.
        reserve = max(map(len, follow)) - 1
        start = encoder.encode(parts, reserve=reserve)
        num_tokens += len(start) + reserve
        spans.append(_continued(rows, start, follow))
    return Plan(rows, spans, _usage(num_tokens))


def _usage(num_tokens: int, written: int = 0) -> Usage:
    return Usage(queries=1, requests=1, prompt_tokens=num_tokens, completion_tokens=written)


def _continued(
    rows: list[Row], start: list[int], follow: Sequence[list[int]]
) -> list[tuple[int, int, int]]:
    """Add the rows of one input, and return the spans of its texts."""
    row_of: dict[tuple[int, ...], int] = {}
    spans = []
    for text in follow:
        # Texts that differ in the last token only share a row: so do all single tokens.
        row = row_of.setdefault(tuple(text[:-1]), len(rows))
        if row == len(rows):
            rows.append(Row([*start, *text[:-1]], []))
        asked = rows[row].asked
        spans.append((row, len(asked), len(asked) + len(text)))
        asked += [(len(start) - 1 + index, token) for index, token in enumerate(text)]
    return spans


class TorchModel:
    """The model and its tokeniser. All methods block, and are not thread-safe."""

    def __init__(
        self, checkpoint: Checkpoint, encoder: Encoder, *, device: str, dtype: str, max_batch: int
    ) -> None:
        self._torch = torch = import_module("torch")
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.encoder, self._device, self.max_batch = encoder, device, max_batch
        # Padding is masked out, so any token will do for a causal model.
        self._pad_id, self._options = 0, {"use_cache": False}
        auto_class = "AutoModelForCausalLM"
        if isinstance(encoder, ClozeEncoder):
            self._pad_id, self._options = encoder.pad_id, {}
            auto_class = "AutoModelForMaskedLM"
        self.module = load_module(auto_class, checkpoint, getattr(torch, dtype), device)
        if self.head is None:
            raise BackendError(f"{checkpoint.name}: the model has no language model head")
        if isinstance(encoder, CausalEncoder):
            # Greedy decoding, in place of the model's recommended sampling.
            self.module.generation_config = import_module("transformers").GenerationConfig(
                do_sample=False,
                pad_token_id=self._pad_id,
                eos_token_id=self.module.generation_config.eos_token_id,
            )

    @property
    def head(self) -> Any:
        """The module that maps hidden states to logits."""
        # For RoBERTa it is the whole head: dense layer, norm and vocabulary.
        return getattr(self.module, "lm_head", None) or self.module.get_output_embeddings()

    def score(self, plan: Plan) -> Answer:
        """Return the log-probability of each text of each input."""
        values = self._in_batches(plan.rows)
        return Answer(
            log_probs=tuple(
                tuple(float32(fsum(values[row][begin:end])) for row, begin, end in spans)
                for spans in plan.spans
            ),
            usage=plan.paid,
        )

    def write(self, plan: Plan, max_tokens: int) -> Answer:
        """Generate greedily up to the model's end token or `max_tokens`."""
        assert isinstance(self.encoder, CausalEncoder)
        ends = self.module.generation_config.eos_token_id
        ends = {ends} if isinstance(ends, int) else set(ends or ())
        written: list[list[int]] = [[]] * len(plan.rows)
        for batch in self._batches(plan.rows):
            with self._failing_clearly(), self._torch.inference_mode():
                ids, mask = self._padded([plan.rows[index].ids for index in batch], right=False)
                found = self.module.generate(
                    input_ids=ids, attention_mask=mask, max_new_tokens=max_tokens
                )[:, ids.shape[1] :].tolist()
            for index, tokens in zip(batch, found, strict=True):
                end = next((at for at, token in enumerate(tokens) if token in ends), len(tokens))
                written[index] = tokens[: end + 1]
        return Answer(
            log_probs=((),) * len(written),
            texts=tuple(
                self.encoder.decode([token for token in tokens if token not in ends])
                for tokens in written
            ),
            usage=plan.paid + Usage(completion_tokens=sum(map(len, written))),
        )

    @contextmanager
    def _failing_clearly(self) -> Iterator[None]:
        torch = self._torch
        try:
            yield
        except torch.OutOfMemoryError as exc:
            if str(self._device).startswith("cuda"):
                torch.cuda.empty_cache()
            raise BackendError(
                f"{self._device} is out of memory at {self.max_batch} rows: "
                "take dtype bfloat16, a smaller model or a smaller batch_size"
            ) from exc
        except (RuntimeError, IndexError, ValueError) as exc:  # torch's exception for a bad input.
            raise BackendError(f"torch failed: {first_line(exc)}") from exc

    def _batches(self, rows: Sequence[Row]) -> Iterator[list[int]]:
        order = list(range(len(rows)))
        if len(rows) > self.max_batch:
            order.sort(key=lambda index: len(rows[index].ids), reverse=True)
        for begin in range(0, len(order), self.max_batch):
            yield order[begin : begin + self.max_batch]

    def _in_batches(self, rows: Sequence[Row]) -> list[list[float]]:
        found: list[list[float]] = [[]] * len(rows)
        for batch in self._batches(rows):
            with self._failing_clearly(), self._torch.inference_mode():
                scored = iter(self._forward([rows[index] for index in batch]).tolist())
            for index in batch:
                found[index] = [next(scored) for _ in rows[index].asked]
        return found

    def _forward(self, rows: Sequence[Row]) -> Any:
        """Return the requested log-probabilities of all rows: float32, nats, whole vocabulary."""
        torch = self._torch
        # The head is expensive, so it runs once per position, for any number of tokens.
        picks = list(
            dict.fromkeys(
                (row, position) for row, (_, asked) in enumerate(rows) for position, _ in asked
            )
        )
        place = {pick: index for index, pick in enumerate(picks)}
        asked = [
            (place[row, position], token)
            for row, (_, pairs) in enumerate(rows)
            for position, token in pairs
        ]
        with self._only(*zip(*picks, strict=True)):
            # Padding is on the right, so causal attention does not reach it.
            ids, mask = self._padded([row.ids for row in rows], right=True)
            logits = self.module(input_ids=ids, attention_mask=mask, **self._options).logits
        if logits.shape[:2] != (1, len(picks)):
            raise BackendError("this architecture computes its logits in a way not known here")
        logits = logits[0].float()
        at, tokens = torch.tensor(asked, device=self._device).unbind(1)
        return logits[at, tokens] - logits.logsumexp(1)[at]

    def _padded(self, sequences: Sequence[Sequence[int]], *, right: bool) -> tuple[Any, Any]:
        width = max(map(len, sequences))
        ids, mask = [], []
        for sequence in sequences:
            padding = [self._pad_id] * (width - len(sequence))
            blank, seen = [0] * len(padding), [1] * len(sequence)
            ids.append([*sequence, *padding] if right else [*padding, *sequence])
            mask.append(seen + blank if right else blank + seen)
        tensor = self._torch.tensor
        return tensor(ids, device=self._device), tensor(mask, device=self._device)

    @contextmanager
    def _only(self, rows: Sequence[int], positions: Sequence[int]) -> Iterator[None]:
        """Restricts the head to these positions, in a batch of one; M picks give (1, M, ...)."""

        def pick(_: object, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return (args[0][list(rows), list(positions)].unsqueeze(0), *args[1:])

        hook = self.head.register_forward_pre_hook(pick)
        try:
            yield
        finally:
            hook.remove()
