"""A loaded masked language model of the RoBERTa family."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedone_sdk.backends.checkpoint import Checkpoint
from fedone_sdk.backends.fitting import ClozeEncoder
from fedone_sdk.backends.torch_model import Plan, Row, TorchModel, Vectors, room_of
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
        vectors: Vectors | None,
    ) -> Plan:
        """Return the label words, each a single token, are scored at the mask."""
        num_soft, reserve = room_of(vectors)
        clozes = [
            self.encoder.encode(rendered, reserve=reserve, num_soft=num_soft) for rendered in inputs
        ]
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

    def _arguments(self, ids: Any, mask: Any, vectors: Vectors | None) -> dict[str, Any]:
        if vectors is None:
            return {"input_ids": ids, "attention_mask": mask}
        # RoBERTa numbers positions from pad_id + 1, but only if it receives ids.
        if vectors.kind == "embeddings":
            return {
                "inputs_embeds": self._embedded(ids, vectors),
                "attention_mask": mask,
                "position_ids": mask.cumsum(1) * mask + self.pad_id,
            }
        return {
            "input_ids": ids,
            "attention_mask": self._with_prefix(mask, vectors),
            "position_ids": (mask.cumsum(1) + vectors.length) * mask + self.pad_id,
            "past_key_values": self._prefix(vectors, len(ids)),
        }

    def _logits(self, arguments: dict[str, Any]) -> Any:
        prefix = arguments.pop("past_key_values", None)
        if prefix is None:
            return super()._logits(arguments)

        def hand_over(_: object, args: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            return args, options | {"past_key_values": prefix}

        # Before version 5 the model with a head does not pass it on to the one without.
        hook = self.module.base_model.register_forward_pre_hook(hand_over, with_kwargs=True)
        try:
            return super()._logits(arguments)
        finally:
            hook.remove()
