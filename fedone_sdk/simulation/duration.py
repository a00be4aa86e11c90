"""How long a planned run takes."""

from __future__ import annotations

from typing import Literal

from fedone_sdk.budget import Usage
from fedone_sdk.messages import Message
from fedone_sdk.simulation.probe import Probe
from fedone_sdk.spec import RunSpec

__all__ = ["Duration", "by_limits", "by_probe"]


class Duration(Message):
    """How long a run takes, and what says so.

    Attributes:
        basis: ``probe``: what is expected after queries were timed on this machine;
            ``rate_limits``: the least that those of the backend allow.
        seconds: All together.
        startup_s: Until the first query: modules, data, the model, clients that enrol.
        training_s: Training.
        evaluation_s: Evaluation.
        probe_queries: Queries that were timed.
        probe_s: How long these took, seconds.
    """

    basis: Literal["probe", "rate_limits"]
    seconds: float
    startup_s: float = 0.0
    training_s: float = 0.0
    evaluation_s: float = 0.0
    probe_queries: int = 0
    probe_s: float = 0.0


def by_limits(spec: RunSpec, expected: Usage) -> Duration | None:
    """How long the rate limits of a backend make a run take; None without limits.

    Args:
        spec: The run.
        expected: What all of it is expected to spend.
    """
    limits = getattr(spec.backend, "limits", None)
    if limits is None:
        return None
    tokens = expected.prompt_tokens + expected.completion_tokens
    pairs = (
        (expected.requests, limits.requests_per_minute),
        (tokens, limits.tokens_per_minute),
    )
    minutes = [amount / limit for amount, limit in pairs if limit is not None]
    if not minutes:
        return None
    return Duration(basis="rate_limits", seconds=round(60 * max(minutes), 1))


def by_probe(
    probe: Probe, *, startup_s: float, training: Usage, evaluation: Usage, rounds: int
) -> Duration:
    """How long a run takes at the speed that a probe measured.

    Args:
        probe: The measurement.
        startup_s: Seconds of the process before the probe.
        training: What training is expected to ask of the model.
        evaluation: The same of evaluation.
        rounds: Rounds of training.
    """
    startup = startup_s + probe.startup_s
    training_s = probe.training_s(
        queries=training.requests, tokens=_tokens(training), rounds=rounds
    )
    evaluation_s = probe.evaluation_s(queries=evaluation.requests, tokens=_tokens(evaluation))
    return Duration(
        basis="probe",
        seconds=round(startup + training_s + evaluation_s, 1),
        startup_s=round(startup, 1),
        training_s=round(training_s, 1),
        evaluation_s=round(evaluation_s, 1),
        probe_queries=probe.queries,
        probe_s=round(probe.seconds, 1),
    )


def _tokens(usage: Usage) -> int:
    return usage.prompt_tokens + usage.completion_tokens
