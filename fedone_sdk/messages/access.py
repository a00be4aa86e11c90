"""Who is let in: enrolment tokens and clients, as people with role admin see them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fedone_sdk.messages.base import Id, Message, Name

__all__ = ["ClientInfo", "ClientList", "CreatedToken", "NewToken", "TokenInfo", "TokenList"]

TokenName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
"""What people call a token."""

Runs = Annotated[
    tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9_.*-]{1,64}$")], ...],
    Field(min_length=1, max_length=64),
]
"""Names of runs, in which ``*`` stands for any text."""


class NewToken(Message):
    """``POST /v1/enrolment-tokens``: a token for devices to enrol with.

    Attributes:
        name: What people call it.
        runs: Runs that its clients may see; None is all.
        uses: How many clients may enrol with it; None is no limit.
        expires_in_s: How long it works, seconds; None is for ever.
    """

    name: TokenName
    runs: Runs | None = None
    uses: Annotated[int, Field(ge=1, le=2**53 - 1)] | None = None
    expires_in_s: Annotated[float, Field(gt=0, le=1e10)] | None = None


class TokenInfo(Message):
    """An enrolment token, without its secret.

    Attributes:
        name: What people call it; those of the configuration begin with ``config:``.
        runs: Runs that its clients may see; None is all.
        uses_left: How many clients may still enrol with it; None is no limit.
        expires_at: When it stops working, seconds since the epoch; None is never.
        created_at: Seconds since the epoch.
        revoked_at: When it was revoked, seconds since the epoch; None while it was not.
    """

    name: str
    runs: tuple[str, ...] | None = None
    uses_left: int | None = None
    expires_at: float | None = None
    created_at: float
    revoked_at: float | None = None


class CreatedToken(TokenInfo):
    """A new enrolment token.

    Attributes:
        token: The secret. It is told this once.
    """

    token: Annotated[str, Field(repr=False)]


class TokenList(Message):
    """``GET /v1/enrolment-tokens``.

    Attributes:
        tokens: In the order they were added.
    """

    tokens: tuple[TokenInfo, ...]


class ClientInfo(Message):
    """An enrolled client, without its secrets.

    Attributes:
        client_id: Public name.
        name: What people call it.
        token: Name of the token that it enrolled with.
        runs: Runs that it may see; None is all.
        signs: Whether it must sign its requests.
        enrolled_at: Seconds since the epoch.
        revoked_at: When it was revoked, seconds since the epoch; None while it was not.
        seen_at: When it last asked for something, within a day, seconds since the epoch.
    """

    client_id: Id
    name: Name | None = None
    token: str | None = None
    runs: tuple[str, ...] | None = None
    signs: bool = False
    enrolled_at: float
    revoked_at: float | None = None
    seen_at: float | None = None


class ClientList(Message):
    """``GET /v1/clients``.

    Attributes:
        clients: In the order they enrolled.
        next: The `after` of the next page; None where there is none.
    """

    clients: tuple[ClientInfo, ...]
    next: int | None = None
