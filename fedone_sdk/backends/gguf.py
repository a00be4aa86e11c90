"""Reader of GGUF metadata.

The engine silently substitutes a default for a missing chat template, so the file is read here.
The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
from collections.abc import Collection
from pathlib import Path
from typing import BinaryIO

from fedone_sdk.errors import SpecError

_STRING, _ARRAY = 8, 9
# By type number; the missing two have no fixed size.
_NUMBERS = ("<B", "<b", "<H", "<h", "<I", "<i", "<f", "<?", None, None, "<Q", "<q", "<d")
_MAX_TEXT = 1 << 24


def read_gguf(file: Path, keys: Collection[str]) -> dict[str, object]:
    """Return the values of these keys in a GGUF file's metadata, of those that the file has.

    Raises:
        SpecError: It is not a GGUF file, or it is truncated.
    """
    try:
        with file.open("rb") as content:
            if content.read(4) != b"GGUF":
                raise SpecError("is no GGUF file", source=str(file))
            version, _, num_pairs = struct.unpack("<IQQ", content.read(20))
            if version < 2:
                raise SpecError(f"is a GGUF file of version {version}; needs 2", source=str(file))
            found: dict[str, object] = {}
            for _ in range(num_pairs):
                key = _text(content)
                value = _value(content, _number(content, "<I"))
                if key in keys and value is not None:
                    found[key] = value
            return found
    except (EOFError, struct.error, UnicodeDecodeError) as exc:
        raise SpecError("is a damaged GGUF file", source=str(file)) from exc
    except OSError as exc:
        raise SpecError(f"cannot be read: {exc.strerror}", source=str(file)) from exc


def _value(content: BinaryIO, kind: int) -> object:
    """Return the next value; None for an array, which is skipped."""
    if kind == _STRING:
        return _text(content)
    if kind != _ARRAY:
        return _number(content, _form(kind))
    inner, length = _number(content, "<I"), _number(content, "<Q")
    if inner not in (_STRING, _ARRAY):
        content.seek(struct.calcsize(_form(inner)) * length, 1)
        return None
    for _ in range(length):
        if inner == _STRING:
            content.seek(_number(content, "<Q"), 1)
        else:
            _value(content, inner)
    return None


def _form(kind: int) -> str:
    form = _NUMBERS[kind] if kind < len(_NUMBERS) else None
    if form is None:
        raise EOFError
    return form


def _number(content: BinaryIO, form: str) -> int:
    found: int = struct.unpack(form, content.read(struct.calcsize(form)))[0]
    return found


def _text(content: BinaryIO) -> str:
    size = _number(content, "<Q")
    if size > _MAX_TEXT:
        raise EOFError
    data = content.read(size)
    if len(data) < size:
        raise EOFError
    return data.decode()
