"""Messages for monitoring: health, the caller's token, seats, token probabilities."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedone_sdk.messages.base import Message, is_none


class Me(Message):
    """``GET /v1/me``: the caller's token.

    Attributes:
        role: Role of the token; a role includes the rights of all lower roles.
        runs: Patterns of the runs that the token is valid for; null is all.
    """

    name: str
    role: Literal["viewer", "operator", "admin"]
    runs: tuple[str, ...] | None = None


class SeatReport(Message):
    """A seat of the current round: a place that is given to one client, with its work.

    Attributes:
        number: Number of the seat in the round, from 0.
        phase: ``offered`` until the client claims the work; ``working`` until the client's update;
            ``done`` after it.
        step: Number of local steps done.
        due_in_s: Seconds until the server gives the seat to another client; null if done.
    """

    number: int
    client_id: str
    phase: Literal["offered", "working", "done"]
    step: int
    due_in_s: float | None = None


class LostWork(Message):
    """An assignment that ended without an update; its seat was given to another client.

    Attributes:
        said: The text that the client sent with its decline, or that the operator gave for the
            client's quarantine; for operators only.
    """

    round: Annotated[int, Field(ge=0)]
    client_id: str
    reason: str
    said: str | None = Field(default=None, exclude_if=is_none)
    at: float


class Seats(Message):
    """``GET /v1/runs/{id}/seats``: the seats of a run.

    Attributes:
        round: Index of the current round, which is also the number of rounds done.
        waiting: Number of clients that wait for work of the run.
        lost: The newest lost assignments, oldest first.
    """

    round: int
    waiting: int
    seats: tuple[SeatReport, ...]
    lost: tuple[LostWork, ...]


class TokenProbability(Message):
    """A candidate at a position (the blank is an empty text), and its probability."""

    token: str
    probability: float


class PositionProbabilities(Message):
    """Token probabilities of one position of the prompt.

    Attributes:
        entropy: Entropy of the distribution over all candidates, bits.
        tokens: The most probable candidates, in descending order.
    """

    entropy: float
    tokens: tuple[TokenProbability, ...]


class TokenProbabilities(Message):
    """``GET /v1/runs/{id}/probabilities``: the candidates' probabilities, computed from alpha.

    Attributes:
        vocab_size: N, the number of candidates per position.
        positions: In the order of the prompt.
        labels: The task's labels, in the order of the prompt's label bias.
    """

    round: int
    vocab_size: int
    positions: tuple[PositionProbabilities, ...]
    labels: tuple[str, ...] = ()


class Check(Message):
    """Result of a check, for example of the store; `detail` is public."""

    ok: bool
    detail: str | None = None


class Health(Message):
    """``GET /healthz`` and ``GET /readyz``.

    Attributes:
        status: ``ok``, or ``unavailable`` if a check other than ``model`` failed.
    """

    status: Literal["ok", "unavailable"]
    checks: dict[str, Check] = Field(default_factory=dict)


class About(Message):
    """``GET /``: name and version of the server, and the path of its OpenAPI document."""

    name: str
    version: str
    openapi: str
