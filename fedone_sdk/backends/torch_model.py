"""A loaded model of the transformers library, run by torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from math import fsum
from typing import Any, NamedTuple

from fedone_sdk.backends.base import Answer, Query, float32
from fedone_sdk.backends.checkpoint import Checkpoint, first_line, load_module
from fedone_sdk.backends.fitting import CausalEncoder, ClozeEncoder
from fedone_sdk.budget import Usage
from fedone_sdk.errors import BackendError
from fedone_sdk.task import Rendered


class Row(NamedTuple):
    """Token ids, and the (position, next token) pairs to score."""

    ids: list[int]
    asked: list[tuple[int, int]]


class Plan(NamedTuple):
    """The forward passes of a query.

    Attributes:
        rows: The sequences.
        spans: Per input and text, its row, and the start and end of its tokens in the row's
            `asked`.
        num_tokens: The tokens of all inputs, each with its longest text.
    """

    rows: list[Row]
    spans: list[list[tuple[int, int, int]]]
    num_tokens: int


class TorchModel(ABC):
    """The model and its tokeniser. All methods block, and are not thread-safe.

    Attributes:
        module: The torch module, in evaluation mode and without gradients of its weights.
        max_batch: Maximum rows per forward pass.

    Raises:
        BackendError: The model cannot be loaded.
    """

    auto_class: str
    forward_options: dict[str, Any] = {}  # noqa: RUF012 (never changed)
    encoder: ClozeEncoder | CausalEncoder
    pad_id: int

    def __init__(
        self,
        checkpoint: Checkpoint,
        max_length: int,
        *,
        device: str,
        dtype: str,
        max_batch: int,
        multi_token_labels: bool,
    ) -> None:
        self._torch = torch = import_module("torch")
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self._device, self._max_length, self.max_batch = device, max_length, max_batch
        self._multi_token_labels = multi_token_labels
        self.module = load_module(self.auto_class, checkpoint, getattr(torch, dtype), device)
        if self.head is None:
            raise BackendError(f"{checkpoint.name}: the model has no language model head")

    @property
    def head(self) -> Any:
        """The module that maps hidden states to logits."""
        # For RoBERTa it is the whole head: dense layer, norm and vocabulary.
        return getattr(self.module, "lm_head", None) or self.module.get_output_embeddings()

    def label_ids(self, label_words: Sequence[str], like: Rendered = ()) -> list[list[int]]:
        """Return the tokens of each label word; in a chat they depend on the frame of `like`.

        Raises:
            LabelWordError: It is not one token (or none, where it may be several).
            BackendError: The input is a chat that the model does not support.
        """
        encoder = self.encoder
        if isinstance(encoder, ClozeEncoder):
            return [[encoder.label_id(word)] for word in label_words]
        return encoder.label_ids(label_words, like, several=self._multi_token_labels)

    @abstractmethod
    def plan(
        self,
        inputs: Sequence[Rendered],
        texts: Sequence[Sequence[list[int]]],
    ) -> Plan:
        """Plans the forward passes for the log-probabilities of each input's texts.

        Raises:
            BackendError: An input does not fit the model.
        """

    def answer(self, query: Query, texts: Sequence[Sequence[list[int]]]) -> Answer:
        """Return the log-probability of each text of each input.

        Raises:
            BackendError: An input does not fit the model, or it cannot be run.
        """
        plan = self.plan(query.inputs, texts)
        values = self._in_batches(plan.rows)
        return Answer(
            log_probs=tuple(
                tuple(float32(fsum(values[row][begin:end])) for row, begin, end in spans)
                for spans in plan.spans
            ),
            usage=Usage(requests=1, prompt_tokens=plan.num_tokens),
        )

    @contextmanager
    def _failing_clearly(self) -> Iterator[None]:
        """Convert torch's exceptions to a `BackendError` of one line."""
        torch = self._torch
        try:
            yield
        except torch.OutOfMemoryError as exc:
            if str(self._device).startswith("cuda"):
                torch.cuda.empty_cache()
            raise BackendError(
                f"{self._device} is out of memory: lower backend.max_batch "
                f"(now {self.max_batch}), or take dtype bfloat16 or a smaller model"
            ) from exc
        except (RuntimeError, IndexError, ValueError) as exc:  # torch's exception for a bad input.
            raise BackendError(f"torch failed: {first_line(exc)}") from exc

    def _in_batches(self, rows: Sequence[Row]) -> list[list[float]]:
        """Return the requested log-probabilities of each row."""
        order = list(range(len(rows)))
        if len(rows) > self.max_batch:
            order.sort(key=lambda index: len(rows[index].ids), reverse=True)
        found: list[list[float]] = [[]] * len(rows)
        for begin in range(0, len(order), self.max_batch):
            batch = order[begin : begin + self.max_batch]
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
            logits = self.module(input_ids=ids, attention_mask=mask, **self.forward_options).logits
        if logits.shape[:2] != (1, len(picks)):
            raise BackendError("this architecture computes its logits in a way not known here")
        logits = logits[0].float()
        at, tokens = torch.tensor(asked, device=self._device).unbind(1)
        return logits[at, tokens] - logits.logsumexp(1)[at]

    def _padded(self, sequences: Sequence[Sequence[int]], *, right: bool) -> tuple[Any, Any]:
        """Token ids and attention mask, shape (len(sequences), longest)."""
        width = max(map(len, sequences))
        ids, mask = [], []
        for sequence in sequences:
            padding = [self.pad_id] * (width - len(sequence))
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


class MaskedModel(TorchModel):
    """A masked language model of the RoBERTa family."""

    auto_class = "AutoModelForMaskedLM"
    encoder: ClozeEncoder

    def __init__(
        self, checkpoint: Checkpoint, max_length: int, *, encoder: Any, **options: Any
    ) -> None:
        self.encoder = encoder
        self.pad_id = self.encoder.pad_id
        super().__init__(checkpoint, max_length, **options)

    def plan(
        self,
        inputs: Sequence[Rendered],
        texts: Sequence[Sequence[list[int]]],
    ) -> Plan:
        """Return the label words, each a single token, are scored at the mask."""
        clozes = [self.encoder.encode(rendered) for rendered in inputs]
        rows = [
            Row(cloze.ids, [(cloze.mask_index, token) for (token,) in labels])
            for cloze, labels in zip(clozes, texts, strict=True)
        ]
        return Plan(
            rows,
            [
                [(index, at, at + 1) for at in range(len(row.asked))]
                for index, row in enumerate(rows)
            ],
            sum(len(row.ids) for row in rows),
        )


class CausalModel(TorchModel):
    """A causal language model."""

    auto_class = "AutoModelForCausalLM"
    forward_options = {"use_cache": False}  # noqa: RUF012 (never changed)
    encoder: CausalEncoder
    pad_id = 0  # Masked out, so any token will do.

    def __init__(
        self, checkpoint: Checkpoint, max_length: int, *, encoder: Any, **options: Any
    ) -> None:
        self.encoder = encoder
        super().__init__(checkpoint, max_length, **options)
        # Greedy decoding, in place of the model's recommended sampling.
        self.module.generation_config = import_module("transformers").GenerationConfig(
            do_sample=False,
            pad_token_id=self.pad_id,
            eos_token_id=self.module.generation_config.eos_token_id,
        )

    def plan(
        self,
        inputs: Sequence[Rendered],
        texts: Sequence[Sequence[list[int]]],
    ) -> Plan:
        """Each text is scored as the continuation of its input."""
        rows: list[Row] = []
        ends: list[list[tuple[int, int, int]]] = []
        num_tokens = 0
        for rendered, follow in zip(inputs, texts, strict=True):
            # The last token of a text is scored, but not part of the input.
            reserve = max(map(len, follow), default=1) - 1
            start = self.encoder.encode(rendered, reserve=reserve)
            num_tokens += len(start) + reserve
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
            ends.append(spans)
        return Plan(rows, ends, num_tokens)

    def write(self, query: Query) -> Answer:
        """Generate greedily up to the model's end token or `max_tokens`.

        Raises:
            BackendError: An input does not fit the model, or it cannot be run.
        """
        if query.max_tokens < 1:
            raise BackendError("a query for a text needs max_tokens of at least 1")
        starts = [
            self.encoder.encode(rendered, reserve=query.max_tokens) for rendered in query.inputs
        ]
        ends = self.module.generation_config.eos_token_id
        ends = {ends} if isinstance(ends, int) else set(ends or ())
        written: list[list[int]] = [[]] * len(starts)
        order = sorted(range(len(starts)), key=lambda index: len(starts[index]), reverse=True)
        for begin in range(0, len(order), self.max_batch):
            batch = order[begin : begin + self.max_batch]
            with self._failing_clearly(), self._torch.inference_mode():
                ids, mask = self._padded([starts[index] for index in batch], right=False)
                found = self.module.generate(
                    input_ids=ids, attention_mask=mask, max_new_tokens=query.max_tokens
                )[:, ids.shape[1] :].tolist()
            for index, tokens in zip(batch, found, strict=True):
                end = next((at for at, token in enumerate(tokens) if token in ends), len(tokens))
                written[index] = tokens[: end + 1]
        return Answer(
            log_probs=((),) * len(starts),
            texts=tuple(
                self.encoder.decode([token for token in tokens if token not in ends])
                for tokens in written
            ),
            usage=Usage(
                requests=1,
                prompt_tokens=sum(map(len, starts)),
                completion_tokens=sum(map(len, written)),
            ),
        )
