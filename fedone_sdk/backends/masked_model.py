"""A loaded masked language model of the RoBERTa family."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedone_sdk.backends.checkpoint import Checkpoint
from fedone_sdk.backends.fitting import ClozeEncoder
from fedone_sdk.backends.torch_model import Plan, Row, TorchModel
from fedone_sdk.task import Rendered


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
