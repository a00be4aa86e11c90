from __future__ import annotations

import pytest

from fedone_sdk import assets


def test_assets_are_plain_files() -> None:
    assert assets.path("roberta_mini/model.int8.onnx").stat().st_size > 1_000_000
    with pytest.raises(FileNotFoundError, match="'nothing'"):
        assets.path("nothing")


def test_the_model_card_points_at_nothing_outside() -> None:
    assert "../" not in assets.path("roberta_mini/MODEL_CARD.md").read_text(encoding="utf-8")
