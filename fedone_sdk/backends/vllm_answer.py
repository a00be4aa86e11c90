"""Parsing of log-probabilities in a vLLM server's answers."""

from __future__ import annotations

import math
import struct
from typing import Any

Rows = tuple[tuple[float, ...], ...]
"""Log-probabilities: one row per input, float32 numbers."""

UNREADABLE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""Exceptions of the functions here for an answer of another form."""


def asking_for(tokens: list[int]) -> dict[str, Any]:
    """The fields of a request for the log-probabilities of given next tokens."""
    return {
        "logprobs": 0,
        "logprob_token_ids": tokens,
        # As ids: two tokens may have the same text.
        "return_tokens_as_token_ids": True,
    }


def next_tokens(answer: Any, num_prompts: int, tokens: list[int]) -> Rows:
    """Per prompt, the log-probabilities of the given tokens; see `asking_for`."""
    shown = [choice["logprobs"]["top_logprobs"][0] for choice in choices(answer, num_prompts)]
    rows = [[row[f"token_id:{token}"] for token in tokens] for row in shown]
    return log_prob_rows(rows, num_prompts, len(tokens))


def choices(answer: Any, num_prompts: int) -> list[Any]:
    """The choices of an answer in the order of the prompts."""
    found = {choice["index"]: choice for choice in answer["choices"]}
    return [found[index] for index in range(num_prompts)]


def log_prob_rows(rows: Any, num_rows: int, num_columns: int) -> Rows:
    """Checks the shape of rows of log-probabilities."""
    found = tuple(tuple(_float32(value) for value in row) for row in rows)
    if [len(row) for row in found] != [num_columns] * num_rows:
        raise ValueError("log-probabilities are missing")
    return found


def ending_log_prob(prompt_log_probs: Any, ending: list[int]) -> float:
    """The log-probability of the last tokens of a prompt."""
    last = prompt_log_probs[-len(ending) :]
    return _float32(
        sum(entry[str(token)]["logprob"] for entry, token in zip(last, ending, strict=True))
    )


def _float32(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError("not a log-probability")
    return float(struct.unpack("<f", struct.pack("<f", value))[0])
