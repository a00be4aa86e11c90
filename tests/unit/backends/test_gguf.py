"""Reading a GGUF file's metadata."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from fedone_sdk.backends.llama_engine import read_gguf
from fedone_sdk.errors import SpecError


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def array(kind: int, *values: bytes) -> bytes:
    return struct.pack("<IQ", kind, len(values)) + b"".join(values)


PAIRS = (
    pair("general.architecture", 8, text("llama")),
    pair("tokens", 9, array(8, text("a"), text("日本"), text(""))),
    pair("scores", 9, array(6, *(struct.pack("<f", value) for value in (0.5, 1.5)))),
    pair("nested", 9, array(9, array(8, text("x")), array(0, b"\1", b"\2"))),
    pair("flag", 7, b"\1"),
    pair("llama.context_length", 4, struct.pack("<I", 8192)),
    pair("size", 10, struct.pack("<Q", 1 << 40)),
    pair("tokenizer.chat_template", 8, text("{{ m }}")),
)


def write(folder: Path, *pairs: bytes, version: int = 3) -> Path:
    file = folder / "model.gguf"
    header = b"GGUF" + struct.pack("<IQQ", version, 0, len(pairs))
    file.write_bytes(header + b"".join(pairs) + b"weights")
    return file


def test_finds_values_behind_arrays_of_all_kinds(tmp_path: Path) -> None:
    file = write(tmp_path, *PAIRS)
    assert read_gguf(file) == {
        "general.architecture": "llama",
        "flag": True,
        "llama.context_length": 8192,
        "size": 1 << 40,
        "tokenizer.chat_template": "{{ m }}",
    }


@pytest.mark.parametrize("size", [0, 3, 10, 24, 40, 90])
def test_a_file_that_is_cut_off(tmp_path: Path, size: int) -> None:
    file = write(tmp_path, *PAIRS)
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(SpecError, match=f"{file}: is (no|a damaged) GGUF file"):
        read_gguf(file)


def test_another_file(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"\x10" * 100)
    with pytest.raises(SpecError, match="is no GGUF file"):
        read_gguf(file)
    with pytest.raises(SpecError, match="cannot be read: No such file"):
        read_gguf(tmp_path / "absent.gguf")


def test_an_impossible_length(tmp_path: Path) -> None:
    huge = write(tmp_path, pair("general.architecture", 8, struct.pack("<Q", 1 << 60)))
    with pytest.raises(SpecError, match="is a damaged GGUF file"):
        read_gguf(huge)


def test_the_first_version(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="of version 1; needs 2"):
        read_gguf(write(tmp_path, *PAIRS, version=1))
