"""A language model whose distribution is a hash of its input."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from hashlib import sha256

_WORDS = (
    " great", "great", " Great", " terrible", "terrible", " Terrible", " yes", "Yes", " no", "No",
    " maybe", "Maybe", " the", "The", " a", " film", " movie", " it", "It", " was", " is", " bad",
    " good", " gre", " ter", " very", " so", " and", " but", " not", ".", ",", "!", "?", "\n", "1",
    "0", " one", " two", " of",
)  # fmt: skip


class FakeModel:
    """Its log-probabilities depend on the text alone.

    Args:
        vocabulary: All tokens it knows.
        spread: Logits lie between 0 and this.
    """

    def __init__(self, vocabulary: Sequence[str] = _WORDS, *, spread: float = 8.0) -> None:
        self.vocabulary = tuple(vocabulary)
        self._spread = spread

    def log_probs(self, text: str) -> dict[str, float]:
        """The log-probabilities of the whole vocabulary after `text`, the likeliest first."""
        logits = {token: self._spread * _uniform(text, token) for token in self.vocabulary}
        total = math.log(math.fsum(map(math.exp, logits.values())))
        return {token: logits[token] - total for token in sorted(logits, key=lambda t: -logits[t])}

    def id_log_prob(self, text: str, token_id: int) -> float:
        """The log-probability of a token id after `text`, over its vocabulary."""
        return -0.01 - 20 * _uniform(text, f"#{token_id}")

    def write(self, text: str, num_tokens: int) -> str:
        """Up to `num_tokens` tokens, the first of them the likeliest one after `text`."""
        written = next(iter(self.log_probs(text)))
        for index in range(1, num_tokens):
            written += self.vocabulary[int(_uniform(text, f"+{index}") * len(self.vocabulary))]
        return written

    def choose(self, text: str, options: Sequence[str], draw: str = "") -> str:
        """One of some options; a draw with a name is the usual one in four of five cases."""
        usual = options[int(_uniform(text, "choice") * len(options))]
        if not draw or _uniform(text, draw) < 0.8:
            return usual
        return next(option for option in options if option != usual)

    @staticmethod
    def count(text: str) -> int:
        """Tokens of a text: never more than its UTF-8 bytes."""
        return len(re.findall(r" ?\w{1,6}|\s|[^\w\s]", text))


def _uniform(*parts: str) -> float:
    digest = sha256("\0".join(parts).encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:6], "big") / 2**48
