"""Soft prompts for a vLLM server, which takes a whole input as vectors or as tokens."""

from __future__ import annotations

import base64
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedone_sdk.backends.base import EmbeddingSpace, Want
from fedone_sdk.backends.embedding_matrix import EmbeddingMatrix
from fedone_sdk.backends.torch_file import torch_saved
from fedone_sdk.backends.vllm_answer import UNREADABLE, asking_for, next_tokens
from fedone_sdk.backends.vllm_server import ServedModel, VllmServer
from fedone_sdk.errors import BackendBlocked, BackendError, BackendUnavailable
from fedone_sdk.soft_prompt import SoftPrompt

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["PromptEmbeds"]

_CLOSE = 0.25
"""Nats; how far log-probabilities may be apart, on average, where the same is asked in two ways.
Rounding to bfloat16 moves them by hundredths, weights of another model by some nats."""


class PromptEmbeds:
    """Makes inputs with a soft prompt into what vLLM calls ``prompt_embeds``.

    Args:
        path: A folder with the served model as safetensors, or one such file.

    Raises:
        SpecError: There is no such file, or no input embedding matrix in it.
    """

    def __init__(self, path: str | Path) -> None:
        self._matrix = EmbeddingMatrix(path)

    @property
    def space(self) -> EmbeddingSpace:
        """Where the input embeddings lie; the first time all of them are read."""
        return self._matrix.space

    def check_query(self, soft: SoftPrompt, want: Want) -> None:
        """Refuses what the server cannot be asked with a soft prompt.

        Raises:
            BackendError: The soft prompt is one for another model, or ``prompt_logprobs`` would be
                needed.
        """
        rows, columns = soft.shape
        if soft.kind != "embeddings" or columns != self._matrix.size:
            raise BackendError(
                f"a soft prompt of {rows} x {columns} {soft.kind} is for another model: "
                f"this server takes embeddings, {self._matrix.size} wide"
            )
        if want == "reference":
            raise BackendError("vLLM cannot score reference texts after embeddings")

    def in_body(self, body: dict[str, Any], soft: SoftPrompt) -> dict[str, Any]:
        """A request with vectors instead of its token ids; the soft prompt's where `SOFT` stands.

        Raises:
            BackendError: The weights here have no such token.
        """
        vectors = soft.array()
        embeds = [_sent(self._matrix.embedded(ids, vectors)) for ids in body["prompt"]]
        return {**body, "prompt": None, "prompt_embeds": embeds}

    async def check_server(self, server: VllmServer, served: ServedModel) -> None:
        """Checks that vectors of tokens are to the server what the tokens are.

        Raises:
            BackendUnavailable: The server does not answer.
            BackendBlocked: It takes no vectors, or has other embeddings.
            BackendError: The weights here are too few.
        """
        if served.masked:
            raise BackendBlocked(
                f"{server.model!r} is a masked model, which takes no embeddings "
                "here: leave embeddings out",
                url=server.url,
            )
        ids = [*served.start, *served.probe][: served.max_length - 1]
        tokens = sorted(set(ids))
        body = {
            "model": server.model,
            "prompt": [ids],
            "prompt_embeds": [_sent(self._matrix.embedded(ids))],
            "max_tokens": 1,
            "temperature": 0,
            **asking_for(tokens),
        }
        try:
            answer = await server.post("/v1/completions", body)
        except (BackendBlocked, BackendUnavailable):
            raise
        except BackendError as exc:
            raise BackendBlocked(
                f"{exc.summary}: start vLLM with --enable-prompt-embeds, and set embeddings to the "
                "weights of its model",
                **exc.private,
            ) from exc
        try:
            first, second = next_tokens(answer, 2, tokens)
        except UNREADABLE as exc:
            raise server.unreadable() from exc
        apart = math.fsum(abs(a - b) for a, b in zip(first, second, strict=True)) / len(tokens)
        if apart > _CLOSE:
            raise BackendBlocked(
                f"{self._matrix.file} does not hold the embeddings of {server.model!r} on "
                f"{server.url}, or that model scales them (as Gemma does): set embeddings to the "
                "weights of the server's own model, or take another model"
            )


def _sent(matrix: NDArray[np.float32]) -> str:
    return base64.b64encode(torch_saved(matrix)).decode()
