from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from fedone_paper.digits import load_digits
from fedone_sdk.errors import DataError

IMAGES = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4) * 10
LABELS = np.array([7, 0], dtype=np.uint8)


def idx(values: np.ndarray, *, kind: int = 8) -> bytes:
    header = struct.pack(f">4B{values.ndim}I", 0, 0, kind, values.ndim, *values.shape)
    return header + values.tobytes()


def write_mnist(
    folder: Path,
    *,
    images: np.ndarray = IMAGES,
    labels: np.ndarray = LABELS,
    test_images: np.ndarray | None = None,
    packed: bool = False,
) -> None:
    for stem in "train", "t10k":
        pictures = images if stem == "train" or test_images is None else test_images
        for name, values in (("images-idx3", pictures), ("labels-idx1", labels)):
            content = idx(values)
            path = folder / f"{stem}-{name}-ubyte{'.gz' if packed else ''}"
            path.write_bytes(gzip.compress(content) if packed else content)


class TestBundled:
    def test_a_fifth_is_held_out_and_no_row_is_lost(self) -> None:
        digits = load_digits()
        assert digits.train_images.shape == (1438, 64)
        assert digits.test_images.shape == (359, 64)
        assert digits.num_pixels == 64
        for images in digits.train_images, digits.test_images:
            assert images.dtype == np.float32
            assert (images.min(), images.max()) == (0.0, 1.0)
        assert np.unique(digits.test_labels).tolist() == list(range(10))


class TestIdx:
    @pytest.mark.parametrize("packed", [False, True])
    def test_values_and_labels(self, tmp_path: Path, packed: bool) -> None:
        write_mnist(tmp_path, packed=packed)
        digits = load_digits(tmp_path)
        assert digits.name == "MNIST"
        assert digits.num_pixels == 12
        np.testing.assert_allclose(digits.train_images[1], np.arange(12, 24) * 10 / 255, rtol=1e-6)
        assert digits.test_labels.tolist() == [7, 0]

    def test_names_with_dots(self, tmp_path: Path) -> None:
        write_mnist(tmp_path)
        for path in list(tmp_path.iterdir()):
            path.rename(path.with_name(path.name.replace("-idx", ".idx")))
        assert load_digits(tmp_path).train_labels.tolist() == [7, 0]

    def test_an_empty_folder_names_what_is_missing(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="has no train-images-idx3-ubyte"):
            load_digits(tmp_path)

    @pytest.mark.parametrize(
        "content",
        [
            b"",
            idx(IMAGES)[:-1],
            idx(IMAGES) + b"\0",
            idx(IMAGES, kind=13),
            idx(LABELS),
            struct.pack(">4B3I", 0, 0, 8, 3, 2**31, 2**31, 2**31),
        ],
        ids=["empty", "cut", "too long", "floats", "labels", "endless"],
    )
    def test_what_is_no_images_file(self, tmp_path: Path, content: bytes) -> None:
        write_mnist(tmp_path)
        (tmp_path / "train-images-idx3-ubyte").write_bytes(content)
        with pytest.raises(DataError, match="train-images-idx3-ubyte"):
            load_digits(tmp_path)
