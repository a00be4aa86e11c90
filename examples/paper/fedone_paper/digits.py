"""Handwritten digits for the toy: MNIST from a folder, or the 8x8 digits of scikit-learn."""

from __future__ import annotations

import gzip
import importlib
import math
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedone_sdk.data import SplitMix64
from fedone_sdk.errors import DataError, needs_extra

NUM_CLASSES = 10

_MAX_BYTES = 2**28
"""Of one file, unpacked: MNIST's largest is 47 MB."""

_TEST_SHARE = 0.2
"""Of the 8x8 digits, which come without a test split."""

_SPLIT_SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Digits:
    """Images and their labels.

    Attributes:
        name: The data set's name in reports.
        train_images: Shape (rows, pixels), float32 in [0, 1].
        train_labels: Shape (rows,), int64 in [0, 10).
        test_images: As `train_images`.
        test_labels: As `train_labels`.
    """

    name: str
    train_images: NDArray[np.float32]
    train_labels: NDArray[np.int64]
    test_images: NDArray[np.float32]
    test_labels: NDArray[np.int64]

    @property
    def num_pixels(self) -> int:
        """Pixels of an image: 784 for MNIST, 64 for the 8x8 digits."""
        return int(self.train_images.shape[1])


def load_digits(folder: Path | None = None) -> Digits:
    """Read MNIST, or the digits of scikit-learn.

    Args:
        folder: Holds MNIST's four IDX files, plain or gzipped (``train-images-idx3-ubyte``,
            ``train-labels-idx1-ubyte``, ``t10k-...``). None is scikit-learn's 1,797 digits, of
            which the same fifth is always held out for tests.

    Raises:
        DataError: The folder holds no such files, or they cannot be used.
        MissingExtraError: scikit-learn is not installed.
    """
    if folder is None:
        return _bundled()
    parts = {
        f"{split}_{what}": _idx(folder, f"{stem}-{what}", dimensions)
        for split, stem in (("train", "train"), ("test", "t10k"))
        for what, dimensions in (("images", 3), ("labels", 1))
    }
    for split in "train", "test":
        images, labels = parts[f"{split}_images"], parts[f"{split}_labels"]
        if not images.size or len(labels) != len(images) or labels.max() >= NUM_CLASSES:
            raise DataError(f"{folder}: there must be one {split} label of 0 to 9 per image")
        scaled = images.reshape(len(images), -1).astype(np.float32) / np.float32(255)
        parts |= {f"{split}_images": scaled, f"{split}_labels": labels.astype(np.int64)}
    return Digits(name="MNIST", **parts)


def _bundled() -> Digits:
    with needs_extra("the bundled digits", "reproduce"):
        datasets = importlib.import_module("sklearn.datasets")
    images, labels = datasets.load_digits(return_X_y=True)
    rows = SplitMix64(_SPLIT_SEED).shuffle(range(len(labels)))
    held_out = round(len(rows) * _TEST_SHARE)
    test, train = rows[:held_out], rows[held_out:]
    scaled = (np.asarray(images) / 16).astype(np.float32)
    classes = np.asarray(labels, dtype=np.int64)
    return Digits(
        name="scikit-learn's 8x8 digits",
        train_images=scaled[train],
        train_labels=classes[train],
        test_images=scaled[test],
        test_labels=classes[test],
    )


def _idx(folder: Path, stem: str, dimensions: int) -> Any:
    """Return a file's bytes behind its header: 0, 0, 8, the number of sizes; the sizes."""
    names = [f"{stem}{mark}idx{dimensions}-ubyte{end}" for mark in "-." for end in ("", ".gz")]
    path = next((folder / name for name in names if (folder / name).is_file()), None)
    if path is None:
        raise DataError(f"{folder}: has no {names[0]} (or with .gz)")
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except (OSError, EOFError, zlib.error) as exc:
        raise DataError(f"{path}: cannot be read: {exc}") from exc
    start = 4 + 4 * dimensions
    if len(content) < start or content[:4] != bytes((0, 0, 8, dimensions)):
        raise DataError(f"{path}: is no IDX file of bytes in {dimensions} dimensions")
    sizes = struct.unpack(f">{dimensions}I", content[4:start])
    if len(content) - start != math.prod(sizes):
        raise DataError(f"{path}: has {len(content) - start} values, its header says {sizes}")
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(sizes)
