"""Label log-probabilities estimated from sampled answers, for models that show none."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace

from fedone_sdk.backends.base import LOG_ZERO, Answer, Query, float32
from fedone_sdk.budget import NOTHING

FIRST = 3
"""Answers to each input; more are sampled only if these differ (docs/benchmarks/sampled.md)."""

_SMOOTHING = 0.5
"""Added to each label's count: the estimate of Krichevsky and Trofimov (1981)."""

Counts = Sequence[float]
"""Of each label, the number of answers that wrote it; then the number of all answers."""


async def sampled(
    query: Query,
    samples: int,
    at_once: Callable[[], int],
    ask: Callable[[Query], Awaitable[Answer]],
) -> Answer:
    """Answer a query for ``labels`` from up to `samples` answers to each input.

    Args:
        query: The query.
        samples: Answers to an input whose first ones differ.
        at_once: Returns how many answers the model gives to one request.
        ask: Sends one request of kind ``counts``.

    Returns:
        The estimates, without usage. An input of which a request failed has none.
    """
    counts: list[Counts | None] = [(0.0,) * (len(query.label_words) + 1) for _ in query.inputs]
    model: str | None = None
    while wanted := {
        place: more for place, row in enumerate(counts) if (more := _missing(row, samples))
    }:
        more = min(*wanted.values(), at_once())
        part = replace(query.part([*wanted]), want="counts", samples=more)
        answer = await ask(part)
        model = model or answer.model
        for place, new in zip(wanted, answer.log_probs, strict=True):
            row = counts[place]
            counts[place] = new and row and tuple(map(sum, zip(row, new, strict=True)))
    rows = tuple(None if row is None else estimated(row) for row in counts)
    return Answer(log_probs=rows, usage=NOTHING, model=model)


def requests_of(samples: int, at_once: int) -> Iterator[int]:
    """Yield the number of answers of each request for one input, at most."""
    for part in (min(FIRST, samples), samples - min(FIRST, samples)):
        for start in range(0, part, at_once):
            yield min(at_once, part - start)


def estimated(counts: Counts) -> tuple[float, ...]:
    """Return the labels' log-probabilities, nats; `LOG_ZERO` if no answer wrote a label.

    ``p(c) = (k_c + 1/2) / (n + C/2)``. An answer without a label says nothing, so it counts as an
    equal part of an answer for each label.
    """
    *labels, total = counts
    if not any(labels):
        return (LOG_ZERO,) * len(labels)
    each = (total - sum(labels)) / len(labels) + _SMOOTHING
    every = total + _SMOOTHING * len(labels)
    return tuple(float32(math.log((count + each) / every)) for count in labels)


def _missing(counts: Counts | None, samples: int) -> int:
    if counts is None:
        return 0
    *labels, total = counts
    agree = total >= min(FIRST, samples) and max(labels) == total
    return 0 if agree else int((samples if total >= FIRST else min(FIRST, samples)) - total)
