"""Synthetic trial records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedone_sdk.budget import Usage
from fedone_sdk.evaluation.results import Point, TrialRecord


def record(
    entrant: str = "thompson",
    seed: int = 0,
    *,
    predicted: Sequence[int | None] = (),
    targets: Sequence[int] = (),
    losses: Sequence[float | None] = (0.5,),
    curve: Sequence[tuple[int, float]] = ((0, 0.5),),
    **facts: Any,
) -> TrialRecord:
    """A trial of which only these things matter."""
    return TrialRecord(
        entrant=entrant,
        seed=seed,
        model=facts.pop("model", "test"),
        status="completed",
        queries=curve[-1][0],
        evaluation_queries=1,
        spent=facts.pop("spent", Usage(requests=1)),
        metric=curve[-1][1],
        loss=0.5,
        predicted=tuple(predicted),
        targets=tuple(targets),
        losses=tuple(losses),
        curve=tuple(Point(queries=queries, metric=metric) for queries, metric in curve),
        wall_s=1.0,
        **facts,
    )
