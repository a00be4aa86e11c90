"""What people who watch runs are told beside results: who they are, who works, what alpha says."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedone_sdk.messages.base import Message

__all__ = [
    "LostWork",
    "Me",
    "PositionProbabilities",
    "SeatReport",
    "Seats",
    "TokenProbabilities",
    "TokenProbability",
]


class Me(Message):
    """``GET /v1/me``: whose token this is.

    Attributes:
        name: What the server's configuration calls it.
        role: What it allows; each role may do what those before it may.
        runs: Patterns of the runs that it is good for; null is all.
    """

    name: str
    role: Literal["viewer", "operator", "admin"]
    runs: tuple[str, ...] | None = None


class SeatReport(Message):
    """One place of the round under way.

    Attributes:
        slot: Which of the K* places.
        client_id: Whose it is.
        phase: ``offered`` waits for the client, ``working`` for its update.
        step: Local steps that are done.
        due_in_s: After how many seconds the client loses it; null where it is done.
    """

    slot: int
    client_id: str
    phase: Literal["offered", "working", "done"]
    step: int
    due_in_s: float | None = None


class LostWork(Message):
    """Work that ended without an update: its seat went to another client, if the run went on.

    Attributes:
        round: In which round.
        client_id: Whose it was.
        reason: Why: a deadline, or what the client said.
        at: When, seconds since the epoch; None where that was before the server started.
    """

    round: Annotated[int, Field(ge=0)]
    client_id: str
    reason: str
    at: float | None = Field(default=None, exclude_if=lambda at: at is None)


class Seats(Message):
    """``GET /v1/runs/{id}/seats``: who works on a run.

    Attributes:
        round: The round under way; the number of rounds done.
        waiting: Clients that wait for work of this run.
        seats: Of the round under way.
        lost: The newest work that came to nothing, oldest first.
    """

    round: int
    waiting: int
    seats: tuple[SeatReport, ...]
    lost: tuple[LostWork, ...]


class TokenProbability(Message):
    """A candidate, and its share of a position's alpha.

    Attributes:
        token: The candidate; empty is the blank.
        probability: From 0 to 1.
    """

    token: str
    probability: float


class PositionProbabilities(Message):
    """What alpha says of one position of the prompt.

    Attributes:
        entropy: Of the position's distribution over all candidates, bits.
        tokens: The likeliest candidates, likeliest first.
    """

    entropy: float
    tokens: tuple[TokenProbability, ...]


class TokenProbabilities(Message):
    """``GET /v1/runs/{id}/probabilities``: alpha as people read it.

    Attributes:
        round: Rounds done.
        vocab_size: N, the candidates of each position.
        positions: In the order of the prompt.
    """

    round: int
    vocab_size: int
    positions: tuple[PositionProbabilities, ...]
