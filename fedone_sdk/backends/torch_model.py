"""A loaded model of the transformers library, run by torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy, deepcopy
from importlib import import_module
from itertools import accumulate
from math import fsum
from typing import Any, NamedTuple, Self

from fedone_sdk.backends.base import Answer, Query, float32
from fedone_sdk.backends.checkpoint import Checkpoint, first_line, load_module
from fedone_sdk.backends.fitting import SOFT, CausalEncoder, ClozeEncoder
from fedone_sdk.budget import Usage
from fedone_sdk.errors import BackendError
from fedone_sdk.soft_prompt import SoftPrompt, SoftPromptKind
from fedone_sdk.task import Rendered


class Vectors(NamedTuple):
    """A soft prompt of n positions (`length`) on the model's device, shaped as `SoftPrompt`."""

    kind: SoftPromptKind
    tensor: Any
    length: int


class Row(NamedTuple):
    """Token ids, with `SOFT` for each vector, and the (position, next token) pairs to score."""

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

    @property
    def embeddings(self) -> Any:
        """The matrix of input embeddings, shape (vocabulary, H)."""
        return self.module.get_input_embeddings().weight

    def copy(self) -> Self:
        """Return a copy of the model with separate weights."""
        other = copy(self)
        other.module = deepcopy(self.module)
        return other

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

    def soft_shape(self, kind: SoftPromptKind, length: int) -> tuple[int, int]:
        """Rows and columns of a soft prompt of `length` vectors.

        The columns of ``key_values`` are those of all key heads of a layer: fewer than the model's
        width if several query heads share keys.

        Raises:
            BackendError: The model has no such layers.
        """
        if kind == "embeddings":
            return length, int(self.embeddings.shape[1])
        layers, heads, head_size = self._attention_shape()
        return 2 * layers * length, heads * head_size

    def vectors(self, soft: SoftPrompt | None) -> Vectors | None:
        """Move a soft prompt to the model's device.

        Raises:
            BackendError: Its shape is that of another model.
        """
        if soft is None:
            return None
        return self.on_device(soft.kind, self._torch.from_numpy(soft.array()))

    def on_device(self, kind: SoftPromptKind, matrix: Any) -> Vectors:
        """`vectors` of a torch matrix, which keeps its gradients."""
        rows, columns = matrix.shape
        per_vector, width = self.soft_shape(kind, 1)
        if columns != width or rows % per_vector:
            raise BackendError(
                f"a soft prompt of {rows} x {columns} numbers is for another model: "
                f"{kind} of this one are {width} wide, and {per_vector} rows per position"
            )
        return Vectors(kind, matrix.to(self._device), rows // per_vector)

    @abstractmethod
    def plan(
        self,
        inputs: Sequence[Rendered],
        texts: Sequence[Sequence[list[int]]],
        vectors: Vectors | None,
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
        vectors = self.vectors(query.soft_prompt)
        plan = self.plan(query.inputs, texts, vectors)
        values = self._in_batches(plan.rows, vectors)
        return Answer(
            log_probs=tuple(
                tuple(float32(fsum(values[row][begin:end])) for row, begin, end in spans)
                for spans in plan.spans
            ),
            usage=Usage(requests=1, prompt_tokens=plan.num_tokens),
        )

    def label_log_probs(
        self, inputs: Sequence[Rendered], labels: Sequence[list[int]], vectors: Vectors | None
    ) -> Any:
        """Return the label words' log-probabilities by one forward pass that keeps its gradients.

        Returns:
            A float32 tensor of shape (len(inputs), len(labels)): nats, over the whole vocabulary.

        Raises:
            BackendError: An input does not fit the model, or it cannot be run.
        """
        plan = self.plan(inputs, [labels] * len(inputs), vectors)
        with self.failing_clearly():
            flat = self._forward(plan.rows, vectors)
            starts = [0, *accumulate(len(row.asked) for row in plan.rows)]
            sums = [
                flat[starts[row] + begin : starts[row] + end].sum()
                for spans in plan.spans
                for row, begin, end in spans
            ]
            return self._torch.stack(sums).view(len(inputs), len(labels))

    @contextmanager
    def failing_clearly(self) -> Iterator[None]:
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

    def _in_batches(self, rows: Sequence[Row], vectors: Vectors | None) -> list[list[float]]:
        """Return the requested log-probabilities of each row."""
        order = list(range(len(rows)))
        if len(rows) > self.max_batch:
            order.sort(key=lambda index: len(rows[index].ids), reverse=True)
        found: list[list[float]] = [[]] * len(rows)
        for begin in range(0, len(order), self.max_batch):
            batch = order[begin : begin + self.max_batch]
            with self.failing_clearly(), self._torch.inference_mode():
                scored = iter(self._forward([rows[index] for index in batch], vectors).tolist())
            for index in batch:
                found[index] = [next(scored) for _ in rows[index].asked]
        return found

    def _forward(self, rows: Sequence[Row], vectors: Vectors | None) -> Any:
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
            logits = self._logits(self._arguments(ids, mask, vectors))
        if logits.shape[:2] != (1, len(picks)):
            raise BackendError("this architecture computes its logits in a way not known here")
        logits = logits[0].float()
        at, tokens = torch.tensor(asked, device=self._device).unbind(1)
        return logits[at, tokens] - logits.logsumexp(1)[at]

    def _logits(self, arguments: dict[str, Any]) -> Any:
        return self.module(**arguments, **self.forward_options).logits

    @abstractmethod
    def _arguments(self, ids: Any, mask: Any, vectors: Vectors | None) -> dict[str, Any]:
        """Return the arguments of the module.

        Args:
            ids: Token ids, shape (rows, length).
            mask: 1 where there is a token, 0 where there is padding; the same shape.
            vectors: The soft prompt.
        """

    def _embedded(self, ids: Any, vectors: Vectors) -> Any:
        """Return the input embeddings of `ids`, with those of the soft prompt at its place."""
        embedded = self.module.get_input_embeddings()(ids.clamp(min=0))
        soft = vectors.tensor.to(embedded.dtype).repeat(len(ids), 1)
        return embedded.masked_scatter((ids == SOFT).unsqueeze(-1), soft)

    def _prefix(self, vectors: Vectors, num_rows: int) -> Any:
        """Return the soft prompt's keys and values of all layers, as a cache of `num_rows` rows."""
        layers, heads, head_size = self._attention_shape()
        pairs = vectors.tensor.to(self.module.dtype).view(
            layers, 2, vectors.length, heads, head_size
        )
        cache = import_module("transformers").DynamicCache()
        for layer, (keys, values) in enumerate(pairs.transpose(2, 3)):
            cache.update(
                keys.expand(num_rows, -1, -1, -1), values.expand(num_rows, -1, -1, -1), layer
            )
        return cache

    def _with_prefix(self, mask: Any, vectors: Vectors) -> Any:
        """Return the attention mask of the prefix and the input."""
        return self._torch.cat([mask.new_ones(len(mask), vectors.length), mask], dim=1)

    def _attention_shape(self) -> tuple[int, int, int]:
        """Layers, key heads, and numbers per head."""
        config = self.module.config.get_text_config()
        try:
            heads = config.num_attention_heads
            size = getattr(config, "head_dim", None) or config.hidden_size // heads
            heads = getattr(config, "num_key_value_heads", None) or heads
            return int(config.num_hidden_layers), int(heads), int(size)
        except AttributeError as exc:
            raise BackendError(
                f"the keys and values of a {type(self.module).__name__} are not known here"
            ) from exc

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


def room_of(vectors: Vectors | None) -> tuple[int, int]:
    """Positions of a soft prompt: in the input, and before it."""
    if vectors is None:
        return 0, 0
    return (vectors.length, 0) if vectors.kind == "embeddings" else (0, vectors.length)
