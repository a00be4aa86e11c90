"""A score function of a generated text and its example, from 0 to 1."""

from collections.abc import Mapping
from typing import Any


def keyword_share(generated: str, example: Mapping[str, Any]) -> float:
    """Return the share of an example's keywords that its summary contains.

    The function runs where the data is: in `fedone tune`, or on each device of a server. Columns
    that the template does not use, such as ``keywords``, never leave the device.
    """
    words = generated.lower()
    keywords = example["keywords"]
    return sum(keyword.lower() in words for keyword in keywords) / len(keywords)
