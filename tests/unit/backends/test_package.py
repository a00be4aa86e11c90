from __future__ import annotations

import subprocess
import sys

import pytest

from fedone_sdk import assets, backends

HEAVY = ("numpy", "onnxruntime", "tokenizers")


def loaded_after(code: str) -> str:
    report = f"import sys; print(*(name for name in {HEAVY} if name in sys.modules))"
    run = [sys.executable, "-c", f"{code}\n{report}"]
    return subprocess.run(run, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize(
    "code",
    [
        "import fedone_sdk.backends",
        "from fedone_sdk.backends import CachedBackend, LLMBackend",
        # Not even a constructed backend has loaded anything: that is left to its worker.
        "from fedone_sdk.backends import OnnxBackend; OnnxBackend()",
    ],
)
def test_the_package_is_light(code: str) -> None:
    assert loaded_after(code) == ""


def test_every_name_is_there() -> None:
    assert sorted(backends.__all__) == backends.__all__
    assert all(hasattr(backends, name) for name in backends.__all__)
    with pytest.raises(AttributeError, match="Nothing"):
        _ = backends.Nothing


def test_assets_are_plain_files() -> None:
    assert assets.path("roberta_mini/model.int8.onnx").stat().st_size > 1_000_000
    with pytest.raises(FileNotFoundError, match="'nothing'"):
        assets.path("nothing")


def test_the_model_card_points_at_nothing_outside() -> None:
    assert "../" not in assets.path("roberta_mini/MODEL_CARD.md").read_text(encoding="utf-8")
