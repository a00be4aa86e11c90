"""A backend whose packages are not there names the extra that brings them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from importlib.machinery import ModuleSpec

import pytest

from fedone_sdk import assets
from fedone_sdk.backends import OnnxBackend, TransformersBackend, VllmBackend
from fedone_sdk.backends.tokens import token_counter
from fedone_sdk.errors import MissingExtraError


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
