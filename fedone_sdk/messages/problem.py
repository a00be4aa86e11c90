"""Errors as RFC 9457 problem details."""

from __future__ import annotations

from typing import Self

from fedone_sdk.errors import ProblemError
from fedone_sdk.messages.base import Message


class Problem(Message):
    """``application/problem+json``.

    Attributes:
        type: A URI reference for the kind of problem.
        title: The kind of problem, in words.
        status: The HTTP status.
        code: Stable code for programs (`fedone_sdk.errors.PROBLEMS`).
        detail: Description of this occurrence.
    """

    type: str
    title: str
    status: int
    code: str
    detail: str

    @classmethod
    def of(cls, error: ProblemError) -> Self:
        """Return the problem of an error."""
        return cls(
            type=f"urn:fedone:problem:{error.code}",
            title=error.title,
            status=error.status,
            code=error.code,
            detail=error.detail,
        )

    def error(self) -> ProblemError:
        """Return the problem as an exception."""
        return ProblemError(self.code, self.detail)
