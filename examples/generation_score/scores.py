"""A score function: what the model wrote and the whole example in, a number from 0 to 1 out."""

from collections.abc import Mapping
from typing import Any


def keyword_share(generated: str, example: Mapping[str, Any]) -> float:
    """The share of an example's keywords that its summary names.

    It runs where the data is: in `fedone tune` here, on each device in a fleet. Columns that the
    template does not use, such as ``keywords``, never leave it.
    """
    words = generated.lower()
    keywords = example["keywords"]
    return sum(keyword.lower() in words for keyword in keywords) / len(keywords)
