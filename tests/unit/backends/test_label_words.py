"""Label words that a model does not accept."""

from __future__ import annotations

import pytest

from fedone_sdk.backends import OnnxBackend
from fedone_sdk.backends.label_words import check_label_words
from fedone_sdk.errors import LabelWordError


async def test_all_wrong_words_are_named_with_words_that_are_one_token() -> None:
    async with OnnxBackend() as backend:
        words = (" unsatisfactory service", " great", "wonderfullest")
        with pytest.raises(LabelWordError) as caught:
            await check_label_words(backend, words)
        error = caught.value
        assert [error.word, *(other.word for other in error.also)] == [words[0], words[2]]
        assert error.suggested == (" service",)
        assert "(did you mean ' service'?)" in error.problems[0]
        assert len(error.problems) == 2
        for word in error.suggested:
            await backend.check((word,))
        with pytest.raises(LabelWordError) as caught:
            await check_label_words(backend, (" Terrible", " great"))
        assert caught.value.suggested[0] == " terrible"
