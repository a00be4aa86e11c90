"""RoBERTa with its language model head, for vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.pooler import Pooler, PoolingParamsUpdate
from vllm.model_executor.models.bert import BertModel
from vllm.model_executor.models.interfaces_base import attn_type, default_pooling_type
from vllm.model_executor.models.roberta import RobertaEmbedding
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix

_EMBEDDING = "roberta.embeddings.word_embeddings.weight"
_DECODER = "lm_head.decoder.weight"


class _Head(nn.Module):
    """The language model head, in float32 like all heads of vLLM."""

    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        super().__init__()
        size = config.hidden_size
        self.dense = nn.Linear(size, size, dtype=dtype)
        self.layer_norm = nn.LayerNorm(size, eps=config.layer_norm_eps, dtype=dtype)
        self.decoder = nn.Linear(size, config.vocab_size, dtype=dtype)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.dense(hidden.to(self.dense.weight.dtype))
        return self.decoder(self.layer_norm(nn.functional.gelu(hidden)))


class _MaskPooler(Pooler):
    """Maps the hidden states at the masks to log-probabilities of the label tokens.

    A request has the mask's token id as ``step_tag_id`` and its label token ids as
    ``returned_token_ids``. A request without them (vLLM's warm-up, or ``/pooling`` without the
    plugin) gets an empty answer, because an exception here would stop the server.
    """

    def __init__(self, head: _Head) -> None:
        super().__init__()
        self.head = head

    def get_supported_tasks(self) -> Set[str]:
        return {"token_classify"}

    def get_pooling_updates(self, task: str) -> PoolingParamsUpdate:
        return PoolingParamsUpdate(requires_token_ids=True)

    def forward(self, hidden_states: torch.Tensor, pooling_metadata: Any) -> list[torch.Tensor]:
        """Return log-probabilities per request: shape (masks, labels), nats, float32."""
        rows: list[int] = []
        columns: list[list[int]] = []  # The label tokens of each row.
        shapes: list[tuple[int, int]] = []
        start = 0
        for ids, length, params in zip(
            pooling_metadata.get_prompt_token_ids_cpu(),
            pooling_metadata.prompt_lens.tolist(),
            pooling_metadata.pooling_params,
            strict=True,
        ):
            labels = params.returned_token_ids or []
            masks = (ids == params.step_tag_id).nonzero().flatten().tolist() if labels else []
            rows += [start + mask for mask in masks]
            columns += [labels] * len(masks)
            shapes.append((len(masks), len(labels)))
            start += length
        # Requests may have different labels. Shorter rows are padded, so that one gather suffices.
        width = max(map(len, columns), default=0)
        filled = [labels + [0] * (width - len(labels)) for labels in columns]
        device = hidden_states.device
        index = torch.tensor(filled, dtype=torch.long, device=device).view(len(rows), width)
        where = torch.tensor(rows, dtype=torch.long, device=device)
        logits = self.head(hidden_states[where]).float()
        log_probs = logits.gather(1, index) - logits.logsumexp(1, keepdim=True)
        per_request = log_probs.split([masks for masks, _ in shapes])
        return [part[:, :labels] for part, (_, labels) in zip(per_request, shapes, strict=True)]


# STEP means "pool only the tokens with the id `step_tag_id`"; other types refuse this parameter.
@attn_type("encoder_only")
@default_pooling_type(tok_pooling_type="STEP")
class RobertaForMaskedLM(nn.Module):
    """vLLM's RoBERTa encoder with the language model head."""

    is_pooling_model = True

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={
            "lm_head.bias": "lm_head.decoder.bias",
            "roberta.embeddings.position_ids": None,  # A constant in old checkpoints.
        }
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        model_config = vllm_config.model_config
        self.config = config = model_config.hf_config
        # RoBERTa numbers positions from pad_token_id + 1; vLLM does not consider this.
        positions = config.max_position_embeddings - config.pad_token_id - 1
        if model_config.max_model_len > positions:
            raise ValueError(
                f"this model has {positions} positions, but the server is set to "
                f"{model_config.max_model_len}: start vLLM with --max-model-len {positions}"
            )
        if vllm_config.scheduler_config.enable_chunked_prefill:
            raise ValueError(
                "an encoder needs whole inputs: start vLLM without --enable-chunked-prefill"
            )
        self.roberta = BertModel(
            vllm_config=vllm_config,
            prefix=maybe_prefix(prefix, "roberta"),
            embedding_class=RobertaEmbedding,
        )
        self.lm_head = _Head(config, model_config.head_dtype)
        self.pooler = _MaskPooler(self.lm_head)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.roberta.embed_input_ids(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the hidden states of all tokens of all requests, concatenated."""
        return self.roberta(
            input_ids=input_ids,
            positions=positions,
            inputs_embeds=inputs_embeds,
            intermediate_tensors=intermediate_tensors,
        )

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load a checkpoint of transformers; vLLM does not start if a weight is missing."""
        return AutoWeightsLoader(self).load_weights(
            self._with_tied_decoder(weights), mapper=self.hf_to_vllm_mapper
        )

    def _with_tied_decoder(
        self, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        # The embedding is read from the checkpoint: the loaded embedding has padding rows, and
        # tensor parallelism splits it between GPUs.
        tied = getattr(self.config, "tie_word_embeddings", True)
        embedding = None
        for name, weight in weights:
            if not (tied and name == _DECODER):
                yield name, weight
            if name == _EMBEDDING:
                embedding = weight
        if tied and embedding is not None:
            yield _DECODER, embedding[: self.config.vocab_size]
