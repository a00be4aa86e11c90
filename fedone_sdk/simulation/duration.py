"""Estimated duration of a planned run."""

from __future__ import annotations

from typing import Literal

from fedone_sdk.budget import Usage
from fedone_sdk.messages import Message
from fedone_sdk.simulation.probe import Probe
from fedone_sdk.spec import RunSpec


class Duration(Message):
    """The estimated duration of a run and the basis of the estimate.

    Attributes:
        basis: ``probe``: the expectation, from queries timed on this machine; ``rate_limits``: the
            lower bound that the backend's rate limits imply.
        seconds: Total.
        startup_s: Before the first query: imports, data, the model, enrolment.
        training_s: Training.
        evaluation_s: Evaluation.
        probe_queries: Number of timed queries.
        probe_s: Duration of the timed queries, seconds.
    """

    basis: Literal["probe", "rate_limits"]
    seconds: float
    startup_s: float = 0.0
    training_s: float = 0.0
    evaluation_s: float = 0.0
    probe_queries: int = 0
    probe_s: float = 0.0


def by_limits(spec: RunSpec, expected: Usage) -> Duration | None:
    """Return the duration that a backend's rate limits imply; None without limits."""
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
    """Return the duration at the speed that a probe measured.

    Args:
        probe: The measurement.
        startup_s: Seconds of the process before the probe.
        training: Expected usage of training.
        evaluation: Expected usage of evaluation.
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
