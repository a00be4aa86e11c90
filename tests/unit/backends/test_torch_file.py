from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fedone_sdk.backends.vllm_embeds import torch_saved

SHAPES = [(1, 1), (3, 5), (300, 1024)]


class Reader(pickle.Unpickler):
    """Reads the pickle of a tensor as torch does, with arrays for storages."""

    def __init__(self, archive: zipfile.ZipFile, folder: str) -> None:
        super().__init__(io.BytesIO(archive.read(f"{folder}/data.pkl")))
        self.archive, self.folder = archive, folder

    def find_class(self, module: str, name: str) -> Any:
        return {
            ("torch._utils", "_rebuild_tensor_v2"): rebuild,
            ("torch", "FloatStorage"): "<f4",
            ("collections", "OrderedDict"): OrderedDict,
        }[module, name]

    def persistent_load(self, found: Any) -> NDArray[np.float32]:
        kind, dtype, name, place, size = found
        assert (kind, place) == ("storage", "cpu")
        storage = np.frombuffer(self.archive.read(f"{self.folder}/data/{name}"), dtype)
        assert len(storage) == size
        return storage


def rebuild(storage: Any, offset: int, size: Any, stride: Any, grad: bool, hooks: Any) -> Any:
    assert (grad, hooks) == (False, OrderedDict())
    strides = [4 * step for step in stride]
    return np.lib.stride_tricks.as_strided(storage[offset:], size, strides)


def matrix_of(shape: tuple[int, int]) -> NDArray[np.float32]:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_file_describes_the_matrix(shape: tuple[int, int]) -> None:
    matrix = matrix_of(shape)
    with zipfile.ZipFile(io.BytesIO(torch_saved(matrix))) as archive:
        assert archive.testzip() is None
        assert {info.compress_type for info in archive.infolist()} == {zipfile.ZIP_STORED}
        assert archive.read("matrix/version") == b"3\n"
        assert archive.read("matrix/byteorder") == b"little"
        assert np.array_equal(Reader(archive, "matrix").load(), matrix)


@pytest.mark.parametrize("shape", SHAPES)
def test_torch_reads_it_back(shape: tuple[int, int]) -> None:
    torch = pytest.importorskip("torch")
    matrix = matrix_of(shape)
    found = torch.load(io.BytesIO(torch_saved(matrix)), weights_only=True)
    assert found.dtype == torch.float32
    assert found.is_contiguous()
    assert np.array_equal(found.numpy(), matrix)


def test_the_same_matrix_makes_the_same_bytes() -> None:
    rows = matrix_of((4, 6))
    assert torch_saved(rows) == torch_saved(rows.copy())
    assert torch_saved(rows.T) == torch_saved(np.ascontiguousarray(rows.T))
