"""The catalogue of local models, and the paths of their files."""

from __future__ import annotations

import dataclasses
import importlib.util
import struct
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path

import platformdirs
import pytest

from fedone_sdk import assets
from fedone_sdk.backends import OnnxBackend, TransformersBackend, VllmBackend, local_models
from fedone_sdk.backends.llama_engine import read_gguf
from fedone_sdk.backends.local_models import LOCAL_MODELS, is_present, model_file, model_path
from fedone_sdk.backends.tokens import token_counter
from fedone_sdk.errors import MissingExtraError, SpecError

SMOLLM2 = "smollm2-135m-instruct"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDONE_CACHE", str(tmp_path))
    return tmp_path


def test_a_fetched_model_is_its_file(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = dataclasses.replace(LOCAL_MODELS[SMOLLM2], name="tiny", num_bytes=4)
    monkeypatch.setattr(local_models, "LOCAL_MODELS", {"tiny": tiny})
    file = cache / "models" / tiny.file_name
    file.parent.mkdir()
    file.write_bytes(b"GGUF")
    assert model_path("tiny") == file
    file.write_bytes(b"GGU")
    with pytest.raises(SpecError) as caught:
        model_path("tiny")
    assert caught.value.problems == [
        f"{file} has 3 bytes, but the file of tiny has 4; fetch it again with: fedone models tiny"
    ]


def test_a_model_that_is_not_there(cache: Path) -> None:
    with pytest.raises(SpecError) as caught:
        model_path(SMOLLM2)
    assert caught.value.problems == [
        f"{SMOLLM2} is not on this machine; fetch it with: fedone models {SMOLLM2}"
    ]
    (cache / "models").write_text("a file where a folder belongs")
    assert not is_present(LOCAL_MODELS[SMOLLM2])


@pytest.mark.parametrize("name", ["", "SmolLM2-135M-Instruct", "../roberta-mini"])
def test_an_unknown_name(name: str) -> None:
    with pytest.raises(SpecError) as caught:
        model_path(name)
    assert caught.value.problems == [
        f"{name!r} is not the name of a local model; known names: roberta-mini, {SMOLLM2}"
    ]


def test_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDONE_CACHE", raising=False)
    folder = platformdirs.user_cache_path("fedone", appauthor=False) / "models"
    assert folder.is_absolute()
    assert local_models.models_folder() == folder
    monkeypatch.setenv("FEDONE_CACHE", "")
    assert local_models.models_folder() == folder


def test_another_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FEDONE_CACHE", "~/models of mine")
    assert local_models.models_folder() == tmp_path / "models of mine" / "models"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDONE_CACHE", "here")
    assert local_models.models_folder() == tmp_path / "here" / "models"


def test_without_platformdirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    monkeypatch.delenv("FEDONE_CACHE", raising=False)
    with pytest.raises(MissingExtraError, match="pip install 'platformdirs>"):
        model_path(SMOLLM2)
    assert model_path("roberta-mini").is_dir()
    monkeypatch.setenv("FEDONE_CACHE", str(tmp_path))
    assert isinstance(model_file(LOCAL_MODELS[SMOLLM2]), Path)


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
    with pytest.raises(SpecError, match=f"{file}: is (not a|a damaged) GGUF file"):
        read_gguf(file)


def test_another_file(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"\x10" * 100)
    with pytest.raises(SpecError, match="is not a GGUF file"):
        read_gguf(file)
    with pytest.raises(SpecError, match="cannot be read: No such file"):
        read_gguf(tmp_path / "absent.gguf")


def test_an_impossible_length(tmp_path: Path) -> None:
    huge = write(tmp_path, pair("general.architecture", 8, struct.pack("<Q", 1 << 60)))
    with pytest.raises(SpecError, match="is a damaged GGUF file"):
        read_gguf(huge)


def test_the_first_version(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="has GGUF version 1; needs 2 or later"):
        read_gguf(write(tmp_path, *PAIRS, version=1))


def counter() -> object:
    return token_counter(model="x", tokenizer=str(assets.path("roberta_mini") / "tokenizer.json"))


@pytest.mark.parametrize(
    ("module", "package", "extra", "make"),
    [
        ("onnx", "onnxruntime", "local", OnnxBackend),
        ("transformers", "torch", "torch", lambda: TransformersBackend("x")),
        ("vllm", "tokenizers", "vllm", lambda: VllmBackend("x")),
        ("tokens", "tokenizers", "local", counter),
    ],
)
def test_a_missing_extra_is_named(
    monkeypatch: pytest.MonkeyPatch,
    module: str,
    package: str,
    extra: str,
    make: Callable[[], object],
) -> None:
    def find_spec(name: str) -> ModuleSpec | None:
        return None if name == package else importlib.util.find_spec(name)

    monkeypatch.setattr(f"fedone_sdk.backends.{module}.find_spec", find_spec)
    with pytest.raises(MissingExtraError, match=rf"pip install .*'{package}>") as caught:
        make()
    assert caught.value.extra == extra
