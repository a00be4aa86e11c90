"""Refusals as RFC 9457 problem details."""

from __future__ import annotations

from typing import Self

from fedone_sdk.errors import ProblemError
from fedone_sdk.messages.base import Message

__all__ = ["Problem"]


class Problem(Message):
    """``application/problem+json``.

    Attributes:
        type: A URI reference for the kind of problem.
        title: The kind of problem, for people.
        status: The HTTP status.
        code: Stable; programs branch on this (`fedone_sdk.errors.PROBLEMS`).
        detail: What happened here.
    """

    type: str
    title: str
    status: int
    code: str
    detail: str

    @classmethod
    def of(cls, error: ProblemError) -> Self:
        """The wire form of a refusal."""
        return cls(
            type=f"urn:fedone:problem:{error.code}",
            title=error.title,
            status=error.status,
            code=error.code,
            detail=error.detail,
        )

    def error(self) -> ProblemError:
        """The refusal as an exception."""
        return ProblemError(self.code, self.detail)
