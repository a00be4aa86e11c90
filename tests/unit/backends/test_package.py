from __future__ import annotations

import pytest

from fedone_sdk import assets, backends


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
