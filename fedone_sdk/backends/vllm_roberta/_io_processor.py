"""Requests to ``/pooling`` of a RoBERTa server: token ids in, log-probabilities out."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from vllm.config import VllmConfig
from vllm.inputs import TokensPrompt
from vllm.outputs import PoolingRequestOutput
from vllm.plugins.io_processors.interface import IOProcessor
from vllm.pooling_params import PoolingParams

_MAX_LABELS = 128  # vLLM's maximum number of log-probabilities for causal models.


class MaskRequest(BaseModel):
    """The field ``data`` of a request."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    # Per input, its token ids with special tokens; exactly one is the mask.
    token_ids: list[list[int]] = Field(min_length=1)
    label_token_ids: list[int] = Field(min_length=1, max_length=_MAX_LABELS)


class MaskIOProcessor(IOProcessor[MaskRequest, dict[str, Any]]):
    """Validates requests, and sends each of their inputs to the engine.

    For a `ValueError` here vLLM returns status 400. An exception inside the engine would stop the
    server, so requests are checked here.
    """

    def __init__(self, vllm_config: VllmConfig, renderer: Any) -> None:
        super().__init__(vllm_config, renderer)
        model = vllm_config.model_config
        if "RobertaForMaskedLM" not in model.architectures:
            raise ValueError(
                f"--io-processor-plugin fedone_roberta serves RobertaForMaskedLM, but the model "
                f"is {', '.join(model.architectures)}: leave the option out"
            )
        mask = renderer.get_tokenizer().mask_token_id
        if mask is None:
            raise ValueError("the model's tokenizer has no mask token")
        self._mask: int = mask
        self._vocab_size: int = model.hf_config.vocab_size
        self._max_length: int = model.max_model_len
        # `pre_process` sets the labels for `merge_pooling_params`, which runs in the same context.
        self._labels: ContextVar[list[int]] = ContextVar("label_token_ids")

    def parse_data(self, data: object) -> MaskRequest:
        try:
            request = MaskRequest.model_validate(data)
        except ValidationError as exc:
            # One line, which does not repeat the input.
            error = exc.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, ("data", *error["loc"])))
            raise ValueError(f"{where}: {error['msg']}") from None
        inputs = {f"data.token_ids.{row}": ids for row, ids in enumerate(request.token_ids)}
        for where, ids in {**inputs, "data.label_token_ids": request.label_token_ids}.items():
            if wrong := [token for token in ids if not 0 <= token < self._vocab_size]:
                last = self._vocab_size - 1
                raise ValueError(f"{where}: {wrong[0]} is not a token id (0 to {last})")
        for where, ids in inputs.items():
            if len(ids) > self._max_length:
                problem = f"has {len(ids)} tokens; the server takes {self._max_length}"
                raise ValueError(f"{where}: {problem}")
            if (num_masks := ids.count(self._mask)) != 1:
                problem = f"needs the mask token, id {self._mask}, exactly once"
                raise ValueError(f"{where}: {problem}, and has it {num_masks} times")
        return request

    def pre_process(
        self, prompt: MaskRequest, request_id: str | None = None, **kwargs: Any
    ) -> Sequence[TokensPrompt]:
        self._labels.set(prompt.label_token_ids)
        return [TokensPrompt(prompt_token_ids=ids) for ids in prompt.token_ids]

    def merge_pooling_params(self, params: PoolingParams | None = None) -> PoolingParams:
        """Return the parameters of the request that was last pre-processed in this context."""
        params = params or PoolingParams()
        params.task = "token_classify"
        params.step_tag_id = self._mask
        params.returned_token_ids = self._labels.get()
        return params

    def post_process(
        self,
        model_output: Sequence[PoolingRequestOutput[Any]],
        request_id: str | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return ``log_probs`` (of the labels, per input, in nats) and ``prompt_tokens``."""
        rows = [output.outputs.data.tolist() for output in model_output]
        if any(len(row) != 1 for row in rows):
            raise ValueError("the mask was cut off: send no truncate_prompt_tokens")
        num_tokens = sum(len(output.prompt_token_ids) for output in model_output)
        return {"log_probs": [log_probs for (log_probs,) in rows], "prompt_tokens": num_tokens}
