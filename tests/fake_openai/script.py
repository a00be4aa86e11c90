"""The scripted behaviour of a fake server: by request number, or drawn with a seed."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

BEHAVIOURS: dict[str, str] = {
    "ok": "answers",
    "rate_limited": "429 with Retry-After in seconds (rate_limited:2 sets them)",
    "rate_limited_ms": "429 with retry-after-ms as well (rate_limited_ms:250)",
    "no_capacity": "429 resource_unavailable, as service_tier flex does",
    "no_quota": "429 insufficient_quota",
    "bad_key": "401 that repeats the key",
    "forbidden": "403",
    "moderated": "403, as OpenRouter does for a flagged text",
    "no_model": "404 model_not_found",
    "too_long": "400 context_length_exceeded",
    "unsupported": "400 unsupported_parameter: max_tokens",
    "filtered_prompt": "400 content_filter, as Azure does",
    "error": "500 (error:502 sets the status)",
    "overloaded": "503",
    "slow_body": "answers, one byte every 10 ms (slow_body:0.05)",
    "truncated": "200, JSON that ends in its middle",
    "reset": "200, and the connection breaks in the middle of the body",
    "hang": "no answer at all",
    "no_usage": "answers without usage",
    "filtered": "answers with finish_reason content_filter",
    "refused": "answers with a refusal",
    "empty": "answers with an end of text at once",
    "reasons": "answers with nothing but reasoning",
    "no_log_probs": "answers without logprobs",
    "error_body": "200 with an error in place of an answer (error_body:402 sets its code)",
    "ended": "answers with finish_reason error (ended:502 adds an error with this code)",
    "parts": "answers with its content in parts, and nulls in unused positions",
    "twice": "shows the sampled token twice (twice:x as another token, without its bytes)",
    "says": "writes a text, in which {} is the label or word (says:Answer: {})",
    "system": "answers with another system_fingerprint (system:fp_2)",
    "raw": "a status and a body (raw:429:{})",
    "merged": "answers, with JSON in place of parts, or parts of its first choice (merged:{})",
    "html": "200, a page that is not JSON",
}
"""The names, and what they do."""


@dataclass(frozen=True)
class Script:
    """Picks a behaviour for each request.

    Args:
        by_number: Request number, from 1 -> behaviour.
        by_text: Part of the text that is sent -> behaviour.
        default: For all others.
        chances: Behaviour -> probability, for all others; what is left is `default`.
        seed: Of the draw; a request's draw depends on nothing but its number and this.
    """

    by_number: Mapping[int, str] = field(default_factory=dict)
    by_text: Mapping[str, str] = field(default_factory=dict)
    default: str = "ok"
    chances: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        named = (*self.by_number.values(), *self.by_text.values())
        for behaviour in (*named, self.default, *self.chances):
            if behaviour.partition(":")[0] not in BEHAVIOURS:
                raise ValueError(f"no behaviour {behaviour!r}; there are {', '.join(BEHAVIOURS)}")

    def pick(self, number: int, text: str = "") -> str:
        """The behaviour for a request."""
        if number in self.by_number:
            return self.by_number[number]
        for part, behaviour in self.by_text.items():
            if part in text:
                return behaviour
        draw = random.Random(f"{self.seed}:{number}").random()
        for behaviour, chance in self.chances.items():
            draw -= chance
            if draw < 0:
                return behaviour
        return self.default
