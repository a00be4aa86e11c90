"""Soft prompts for a vLLM server, which accepts an input either as vectors or as tokens."""

from __future__ import annotations

import base64
import io
import math
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import ZipFile, ZipInfo

from fedone_sdk.backends.base import EmbeddingSpace, Want
from fedone_sdk.backends.embedding_matrix import EmbeddingMatrix
from fedone_sdk.backends.vllm_server import (
    UNREADABLE,
    ServedModel,
    VllmServer,
    asking_for,
    next_tokens,
)
from fedone_sdk.errors import BackendBlocked, BackendError, BackendUnavailable
from fedone_sdk.soft_prompt import SoftPrompt

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_CLOSE = 0.25
"""Tolerance in nats of the mean difference between log-probabilities for tokens and for vectors.
Rounding to bfloat16 changes them by hundredths, weights of another model by several nats."""


class PromptEmbeds:
    """Converts inputs with a soft prompt to vLLM's ``prompt_embeds``, by the model's weights.

    Raises:
        SpecError: There is no such folder or file, or no input embedding matrix in it.
    """

    def __init__(self, path: str | Path) -> None:
        self._matrix = EmbeddingMatrix(path)

    @property
    def space(self) -> EmbeddingSpace:
        """The scale of the input embeddings; the first call reads the whole matrix."""
        return self._matrix.space

    def check_query(self, soft: SoftPrompt, want: Want) -> None:
        """Check that the server supports a query with a soft prompt.

        Raises:
            BackendError: The soft prompt has the shape of another model, or the query needs
                ``prompt_logprobs``.
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
        """Return the request with vectors instead of token ids; the soft prompt replaces `SOFT`.

        Raises:
            BackendError: The local weights do not have such a token.
        """
        vectors = soft.array()
        embeds = [_sent(self._matrix.embedded(ids, vectors)) for ids in body["prompt"]]
        return {**body, "prompt": None, "prompt_embeds": embeds}

    async def check_server(self, server: VllmServer, served: ServedModel) -> None:
        """Check that the server's answers for tokens and for their vectors are equal.

        Raises:
            BackendUnavailable: The server does not answer.
            BackendBlocked: The server does not support vectors, or has other embeddings.
            BackendError: The local weights do not have all tokens.
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


def torch_saved(matrix: NDArray[np.float32]) -> bytes:
    """Return a float32 matrix, not empty, as a file for ``torch.load(..., weights_only=True)``.

    The file is a zip archive with a pickle, in the form of torch 1.6 and later, and the numbers.
    Equal matrices give equal bytes.
    """
    rows, columns = matrix.shape
    files = {
        "data.pkl": _pickle(rows, columns),
        "byteorder": b"little",
        "data/0": matrix.astype("<f4").tobytes(),
        "version": b"3\n",
    }
    archive = io.BytesIO()
    with ZipFile(archive, "w") as zipped:  # Uncompressed, as torch requires.
        for name, content in files.items():
            zipped.writestr(ZipInfo(f"matrix/{name}"), content)
    return archive.getvalue()


def _pickle(rows: int, columns: int) -> bytes:
    """`_rebuild_tensor_v2(storage, 0, (rows, columns), (columns, 1), False, OrderedDict())`."""
    size = b"(%b%bt" % (_integer(rows), _integer(columns))
    stride = b"(%b%bt" % (_integer(columns), _integer(1))
    storage = (
        b"("
        + _text("storage")
        + b"ctorch\nFloatStorage\n"
        + _text("0")  # The name of its file.
        + _text("cpu")
        + _integer(rows * columns)
        + b"tQ"  # A persistent id, by which the reader finds the storage.
    )
    hooks = b"ccollections\nOrderedDict\n)R"
    return (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n("
        + (storage + _integer(0) + size + stride + b"\x89" + hooks)
        + b"tR."
    )


def _integer(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


def _text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()
