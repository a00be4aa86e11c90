"""The catalogue of local models, and the paths of their files."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import platformdirs
import pytest

from fedone_sdk.backends import local_models
from fedone_sdk.backends.local_models import (
    LOCAL_MODELS,
    cache_folder,
    is_present,
    model_file,
    model_path,
)
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
        f"{file} has 3 bytes, and tiny has 4; fetch it again with: fedone models tiny"
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
    assert cache_folder() == platformdirs.user_cache_path("fedone", appauthor=False)
    assert cache_folder().is_absolute()
    monkeypatch.setenv("FEDONE_CACHE", "")
    assert cache_folder() == platformdirs.user_cache_path("fedone", appauthor=False)


def test_another_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FEDONE_CACHE", "~/models of mine")
    assert cache_folder() == tmp_path / "models of mine"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDONE_CACHE", "here")
    assert cache_folder() == tmp_path / "here"


def test_without_platformdirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    monkeypatch.delenv("FEDONE_CACHE", raising=False)
    with pytest.raises(MissingExtraError, match="pip install 'platformdirs>"):
        model_path(SMOLLM2)
    assert model_path("roberta-mini").is_dir()
    monkeypatch.setenv("FEDONE_CACHE", str(tmp_path))
    assert isinstance(model_file(LOCAL_MODELS[SMOLLM2]), Path)
