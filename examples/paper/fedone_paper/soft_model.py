"""A masked model of the RoBERTa family, with a soft prompt: vectors in place of a text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy, deepcopy
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from fedone_sdk.backends.encoders import ClozeEncoder, read_max_length
from fedone_sdk.backends.transformers import find_checkpoint, hash_folder, load_module
from fedone_sdk.losses import example_loss, predicted
from fedone_sdk.metrics import evaluate
from fedone_sdk.task import Example, Part, Rendered, TaskSpec, render, target_of

Kind = Literal["embeddings", "key_values"]
"""Where vectors act: in the prompt's place, or in all layers as keys and values before the input.
"""


class Soft(NamedTuple):
    """A prompt of vectors.

    Attributes:
        kind: Where the vectors act.
        values: Float32, shape (n, H), or (P, n, H) for P prompts. For ``key_values`` the shape is
            (2 L n, H): the rows from 2 l n on are the n keys of layer l, then its n values.
    """

    kind: Kind
    values: Any


class Measured(NamedTuple):
    """Mean loss (nats) and metric of a prompt."""

    loss: float
    metric: float


class SoftModel:
    """The model and its tokeniser, in float32.

    Log-probabilities are over the whole vocabulary. If an input with its keys and values is too
    long, its text fields are truncated.

    Attributes:
        fingerprint: ``transformers:<name>:<version>:float32``.
        module: The torch module, in evaluation mode; its weights need no gradients.

    Args:
        folder: The model's folder.
    """

    def __init__(self, folder: Path) -> None:
        self._torch = torch = import_module("torch")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        checkpoint = find_checkpoint(str(folder))
        self.fingerprint = f"transformers:{checkpoint.name}:{hash_folder(folder)}:float32"
        self._folder, self._max_length = folder, read_max_length(folder, causal=False)
        self._encoders: dict[int, ClozeEncoder] = {}
        self.module = load_module("AutoModelForMaskedLM", checkpoint, torch.float32, device)

    def copy(self) -> Self:
        """Return a copy of the model with separate weights."""
        other = copy(self)
        other.module = deepcopy(self.module)
        return other

    @cached_property
    def width(self) -> int:
        """H, the width of the embeddings."""
        return int(self.module.get_input_embeddings().weight.shape[1])

    @cached_property
    def embedding_std(self) -> float:
        """Standard deviation of all entries of the input embeddings."""
        matrix = self.module.get_input_embeddings().weight
        return float(matrix.double().std(correction=0).item())

    @property
    def num_layers(self) -> int:
        """L, the number of layers."""
        return int(self.module.config.num_hidden_layers)

    def log_probs(
        self, task: TaskSpec, examples: Sequence[Example], soft: Soft | None = None
    ) -> Any:
        """Return the label words' log-probabilities with their gradients, shape (B, C), nats.

        For P prompts the shape is (P B, C): first all rows of the first prompt.
        """
        torch, module = self._torch, self.module
        length = 0 if soft is None else self._length(soft)
        prefix = length if soft is not None and soft.kind == "key_values" else 0
        encoder = self._encoder(prefix)
        inputs = [_placed(render(task, "", example), length - prefix) for example in examples]
        prompts = len(soft.values) if soft is not None and soft.values.dim() == 3 else 1
        clozes = [encoder.encode(parts) for parts in inputs] * prompts
        longest = max(len(cloze.ids) for cloze in clozes)
        rows = [[*cloze.ids, *[encoder.pad_id] * (longest - len(cloze.ids))] for cloze in clozes]
        seen = [[position < len(cloze.ids) for position in range(longest)] for cloze in clozes]
        ids = torch.tensor(rows, device=module.device)
        mask = torch.tensor(seen, device=module.device).long()
        arguments = self._arguments(ids, mask, soft, encoder.pad_id)
        hidden = module.base_model(**arguments)[0]
        # The head is expensive, so it is applied only to the masks.
        masks = [cloze.mask_index for cloze in clozes]
        logits = module.lm_head(hidden[list(range(len(masks))), masks]).float()
        labels = [token for (token,) in encoder.label_ids(task.label_words)]
        return logits[:, labels] - logits.logsumexp(1, keepdim=True)

    def losses(self, task: TaskSpec, examples: Sequence[Example], soft: Soft | None = None) -> Any:
        """Return each prompt's mean cross-entropy with its gradients, shape (P,), nats."""
        found = self.log_probs(task, examples, soft)
        targets = found.new_tensor([target_of(task, example) for example in examples]).long()
        prompts = len(found) // len(examples)
        cross_entropy = self._torch.nn.functional.cross_entropy
        each = cross_entropy(found, targets.repeat(prompts), reduction="none")
        return each.view(prompts, -1).mean(1)

    def measure(
        self, task: TaskSpec, examples: Sequence[Example], batch_size: int, soft: Soft | None = None
    ) -> Measured:
        """Return the mean loss and the metric of a prompt; None means no prompt."""
        rows: list[tuple[float, ...]] = []
        with self._torch.inference_mode():
            for begin in range(0, len(examples), batch_size):
                found = self.log_probs(task, examples[begin : begin + batch_size], soft)
                rows += map(tuple, found.tolist())
        losses = [
            example_loss(task, row, example) for row, example in zip(rows, examples, strict=True)
        ]
        targets = [int(target_of(task, example)) for example in examples]
        metric = evaluate(task.metric, [predicted(task, row) for row in rows], targets, None)
        return Measured(math.fsum(losses) / len(losses), metric)

    def _encoder(self, prefix: int) -> ClozeEncoder:
        if prefix not in self._encoders:
            file = self._folder / "tokenizer.json"
            self._encoders[prefix] = ClozeEncoder(file, self._max_length - prefix)
        return self._encoders[prefix]

    def _length(self, soft: Soft) -> int:
        rows = int(soft.values.shape[-2])
        return rows if soft.kind == "embeddings" else rows // (2 * self.num_layers)

    def _arguments(self, ids: Any, mask: Any, soft: Soft | None, pad_id: int) -> dict[str, Any]:
        # RoBERTa numbers positions from pad_id + 1, but only if it receives ids.
        if soft is None:
            return {"input_ids": ids, "attention_mask": mask}
        values, length = soft.values.to(self.module.device), self._length(soft)
        if soft.kind == "embeddings":
            embedded = self.module.get_input_embeddings()(ids)
            # A pad token inside an input is the placeholder of a vector.
            places = ((ids == pad_id) & mask.bool()).unsqueeze(-1)
            each = values.view(-1, length, values.shape[-1])
            each = each.repeat_interleave(len(ids) // len(each), 0)
            return {
                "inputs_embeds": embedded.masked_scatter(places, each),
                "attention_mask": mask,
                "position_ids": mask.cumsum(1) * mask + pad_id,
            }
        heads = self.module.config.num_attention_heads
        pairs = values.view(self.num_layers, 2, length, heads, -1)
        cache = import_module("transformers").DynamicCache()
        for layer, (keys, found) in enumerate(pairs.transpose(2, 3)):
            cache.update(
                keys.expand(len(ids), -1, -1, -1), found.expand(len(ids), -1, -1, -1), layer
            )
        return {
            "input_ids": ids,
            "attention_mask": self._torch.cat([mask.new_ones(len(mask), length), mask], dim=1),
            "position_ids": (mask.cumsum(1) + length) * mask + pad_id,
            "past_key_values": cache,
        }


def _placed(parts: Rendered, length: int) -> Rendered:
    """Return an input with `length` pad tokens in place of its prompt."""
    found: list[Part] = []
    for part in parts:
        found += [Part("special", "<pad>")] * length if length and part.kind == "prompt" else [part]
    return tuple(found)
