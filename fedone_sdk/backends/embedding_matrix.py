"""Input embeddings of a model in a folder, read without loading the model."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedone_sdk.backends.base import EmbeddingSpace
from fedone_sdk.backends.fitting import SOFT, read_json
from fedone_sdk.budget import NOTHING
from fedone_sdk.errors import BackendError, SpecError

_NAMES = (
    "model.embed_tokens.weight",  # Llama, Qwen, Mistral, Phi, OLMo
    "model.language_model.embed_tokens.weight",
    "model.decoder.embed_tokens.weight",  # OPT
    "transformer.wte.weight",  # GPT-2, GPT-J
    "wte.weight",
    "gpt_neox.embed_in.weight",
    "transformer.word_embeddings.weight",  # BLOOM, Falcon
    "word_embeddings.weight",
)
_TYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_MAX_HEADER = 100_000_000
"""Bytes; the format's own limit."""
_BLOCK = 4096
"""Rows per chunk; a copy of all rows could take gigabytes."""


class EmbeddingMatrix:
    """The memory-mapped input embedding matrix of a causal model. Thread-safe.

    Args:
        path: A folder with a model's safetensors files, or one such file. Only this matrix is read.

    Raises:
        SpecError: There is no such file, or no such matrix in it.
    """

    def __init__(self, path: str | Path) -> None:
        places = _tensors(Path(path).expanduser())
        name = next((name for name in _NAMES if name in places), None)
        if name is None:
            raise _refused(
                f"there is no input embedding matrix in {str(path)!r}: "
                f"looked for {', '.join(_NAMES)}"
            )
        self.name, self.file = name, places[name]
        self._stored, self._bfloat16 = _mapped(self.file, name)

    @property
    def size(self) -> int:
        """H, the width of the model."""
        return int(self._stored.shape[1])

    def embedded(
        self, ids: Sequence[int], vectors: NDArray[np.float32] | None = None
    ) -> NDArray[np.float32]:
        """Return an input as vectors, shape (len(ids), H).

        Args:
            ids: Token ids, with `SOFT` at the place of each vector.
            vectors: One per `SOFT`, of width H.

        Raises:
            BackendError: A token is not in the matrix.
        """
        places = np.asarray(ids, dtype=np.intp)
        if places.max(initial=0) >= len(self._stored):
            raise BackendError(
                f"{self.file} has the embeddings of {len(self._stored)} tokens, none of token "
                f"{places.max()}: set embeddings to the weights of the server's own model",
                usage=NOTHING,
            )
        soft = places == SOFT
        found = self._numbers(self._stored[np.where(soft, 0, places)])
        if vectors is not None:
            found[soft] = vectors
        return found

    @cached_property
    def space(self) -> EmbeddingSpace:
        """The scale of the embeddings; the first call reads the whole matrix."""
        total = squares = 0.0
        for begin in range(0, len(self._stored), _BLOCK):
            block = self._numbers(self._stored[begin : begin + _BLOCK]).astype(np.float64)
            total += float(block.sum())
            squares += float(np.square(block).sum())
        mean = total / self._stored.size
        std = math.sqrt(max(squares / self._stored.size - mean**2, 0.0))
        return EmbeddingSpace(size=self.size, std=std)

    def _numbers(self, stored: NDArray[Any]) -> NDArray[np.float32]:
        if self._bfloat16:  # The upper half of a float32; NumPy has no such type.
            return (stored.astype(np.uint32) << 16).view(np.float32)
        return stored.astype(np.float32)


def _tensors(path: Path) -> dict[str, Path]:
    """Return the file of each tensor, by its name."""
    if path.is_file():
        return dict.fromkeys(_header(path), path)
    # For a model in several files, only the index and the matrix's file are read.
    index = read_json(path / "model.safetensors.index.json").get("weight_map")
    if isinstance(index, dict):
        return {name: path / str(file) for name, file in index.items()}
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise _refused(f"there is no safetensors file {str(path)!r}, nor one in a folder so named")
    return {name: file for file in files for name in _header(file)}


def _header(file: Path) -> dict[str, Any]:
    """Return the header of a safetensors file."""
    try:
        with file.open("rb") as content:
            size = int.from_bytes(content.read(8), "little")
            if size > _MAX_HEADER:
                raise ValueError("the header is too long")
            header = json.loads(content.read(size))
    except (OSError, ValueError) as exc:
        raise _refused(f"{file} cannot be read as a safetensors file: {exc}") from exc
    if not isinstance(header, dict):
        raise _refused(f"{file} is not a safetensors file")
    return header


def _mapped(file: Path, name: str) -> tuple[NDArray[Any], bool]:
    """Return a matrix as stored, and whether its type is bfloat16."""
    try:
        entry = _header(file)[name]
        kind, (num_rows, size), (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        dtype = np.dtype(_TYPES[kind])
        if min(num_rows, size) < 1 or end - begin != num_rows * size * dtype.itemsize:
            raise ValueError(f"shape {num_rows} x {size} in {end - begin} bytes")
        with file.open("rb") as content:
            start = 8 + int.from_bytes(content.read(8), "little") + begin
        stored = np.memmap(file, dtype, "r", start, (num_rows, size))
    except (KeyError, OSError, TypeError, ValueError) as exc:
        raise _refused(
            f"{name} in {file} is not a matrix of {', '.join(_TYPES)} numbers ({exc!r})"
        ) from exc
    return np.asarray(stored), kind == "BF16"


def _refused(problem: str) -> SpecError:
    return SpecError(f"embeddings: {problem}", source="backend")
