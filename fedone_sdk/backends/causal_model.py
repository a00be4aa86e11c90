"""A loaded causal language model."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from fedone_sdk.backends.base import Answer, Query
from fedone_sdk.backends.checkpoint import Checkpoint
from fedone_sdk.backends.fitting import CausalEncoder
from fedone_sdk.backends.torch_model import Plan, Row, TorchModel
from fedone_sdk.budget import Usage
from fedone_sdk.errors import BackendError
from fedone_sdk.task import Rendered


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
