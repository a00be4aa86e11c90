"""What a provider bills beyond the quotes of its adapter."""

from __future__ import annotations

import math
from decimal import Decimal

from fedone_sdk.budget import NOTHING, Usage

_MARGIN = 2
"""Later quotes are raised by this multiple of the largest surplus, so that a bill that grows from
request to request is not ahead of the quotes of concurrent requests."""

_MOST = 2**53


class Surplus:
    """Learns from each answer how much a provider bills beyond its adapter's quote.

    Causes are hidden reasoning, a longer chat template, or another tokeniser. Prompt tokens and
    money are learnt in proportion to the quote, completion tokens per input.

    Attributes:
        unsure: Whether the last answer was billed beyond its raised quote, so that the next request
            has to be sent alone.
    """

    def __init__(self) -> None:
        self.unsure = False
        self._prompt = 0.0
        self._completion = 0.0
        self._usd = Decimal(0)

    def raised(self, quoted: Usage, num_inputs: int) -> Usage:
        """Return the bound of a request, given its adapter's quote."""
        if not (self._prompt or self._completion or self._usd):
            return quoted
        prompt = quoted.prompt_tokens * (1 + _MARGIN * self._prompt)
        completion = quoted.completion_tokens + _MARGIN * self._completion * num_inputs
        return quoted.model_copy(
            update={
                "prompt_tokens": min(math.ceil(prompt), _MOST),
                "completion_tokens": min(math.ceil(completion), _MOST),
                "usd": min(quoted.usd * (1 + _MARGIN * self._usd), Decimal(_MOST)),
            }
        )

    def learn(self, quoted: Usage, billed: Usage, num_inputs: int) -> Usage:
        """Take the bill of a request, and return by how much it exceeds the raised quote."""
        more = billed.beyond(quoted)
        if not (more.prompt_tokens or more.completion_tokens or more.usd):
            self.unsure = False
            return NOTHING
        over = billed.beyond(self.raised(quoted, num_inputs)).model_copy(
            update={"queries": 0, "requests": 0}
        )
        self.unsure = over != NOTHING
        self._prompt = max(self._prompt, more.prompt_tokens / max(quoted.prompt_tokens, 1))
        self._completion = max(self._completion, more.completion_tokens / num_inputs)
        if quoted.usd:
            self._usd = max(self._usd, more.usd / quoted.usd)
        return over
