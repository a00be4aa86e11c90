"""Warm start of a new run from an earlier one."""

from __future__ import annotations

import math

import numpy as np

from fedone_sdk.errors import ArchiveError
from fedone_sdk.reports.source import ReportedRun

_BELIEVED = 0.8
"""Probability of a prompt's tokens if the earlier alpha is not known."""

_MOST = 32
"""Maximum tokens of a position."""


def start_of(run: ReportedRun) -> tuple[dict[str, float], ...]:
    """A run's alpha in the form of `PromptSpec.start`; for a result file, its prompt's tokens.

    Each position has its most likely tokens, as far as they are more likely than the average one,
    because the new run may have other candidates.

    Args:
        run: The earlier run.

    Raises:
        ArchiveError: The run tunes vectors.
    """
    if run.alpha is None or run.vocabulary is None:
        if not run.result.prompt.tokens:
            raise ArchiveError(f"run {run.result.run_id!r} tunes no words")
        return tuple({token: _BELIEVED} for token in run.result.prompt.tokens)
    weights = run.alpha.astype(np.float64)
    start = []
    for position, row in enumerate(weights / weights.sum(axis=1, keepdims=True)):
        candidates = run.vocabulary.of_position(position)
        row = row[: len(candidates)]
        likeliest = [at for at in np.argsort(-row, kind="stable")[:_MOST] if row[at] > row.mean()]
        # Rounded down, so that they do not sum to more than 1.
        shares = {at: math.floor(row[at] * 1e6) / 1e6 for at in likeliest}
        start.append({candidates[at]: share for at, share in shares.items() if share})
    return tuple(start)
