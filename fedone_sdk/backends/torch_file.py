"""Writer of `torch.save` files without torch."""

from __future__ import annotations

import io
import struct
from typing import TYPE_CHECKING
from zipfile import ZipFile, ZipInfo

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def torch_saved(matrix: NDArray[np.float32]) -> bytes:
    """A float32 matrix as a file for ``torch.load(..., weights_only=True)``.

    The file is a zip archive with a pickle, in the form of torch 1.6 and later, and the numbers.
    Equal matrices give equal bytes.

    Args:
        matrix: Two-dimensional and not empty.
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
