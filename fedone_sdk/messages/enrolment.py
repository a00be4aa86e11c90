"""Enrolment of clients, their credentials, and the tokens that they enrol with."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from fedone_sdk.messages.base import Id, Message, Name, is_sendable

Nonce = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{22,128}$")]


def _sendable(secret: str) -> str:
    if not is_sendable(secret):
        raise ValueError("has characters that a header cannot carry; it must be printable ASCII")
    return secret


Secret = Annotated[str, AfterValidator(_sendable)]
"""A bearer token."""


class Enrol(Message):
    """``POST /v1/clients``, authorised by an enrolment token.

    Attributes:
        nonce: At least 16 random bytes that the device generates once, base64url, secret. A second
            request with the same nonce returns the same client with a new credential.
    """

    name: Name | None = None
    nonce: Annotated[Nonce | None, Field(repr=False)] = None


class Enrolled(Message):
    """The new identity. The client then sends the secret `credential` as its bearer token."""

    client_id: Id
    credential: Annotated[Secret, Field(repr=False)]


class Rotated(Message):
    """A new credential, ``POST /v1/clients/me/credential``.

    The previous credential stays valid until the new one is used.
    """

    credential: Annotated[Secret, Field(repr=False)]


TokenName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]
"""Name of a token."""

Runs = Annotated[
    tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9_.*-]{1,64}$")], ...],
    Field(min_length=1, max_length=64),
]
"""Names of runs, in which ``*`` stands for any text."""


class NewToken(Message):
    """``POST /v1/enrolment-tokens``: a token with which devices enrol.

    Attributes:
        runs: Runs that clients with this token may access; null is all.
        uses: Maximal number of clients that enrol with the token; null is unlimited.
        expires_in_s: Lifetime of the token, seconds; null is unlimited.
    """

    name: TokenName
    runs: Runs | None = None
    uses: Annotated[int, Field(ge=1, le=2**53 - 1)] | None = None
    expires_in_s: Annotated[float, Field(gt=0, le=1e10)] | None = None


class TokenInfo(Message):
    """An enrolment token, without its secret.

    Attributes:
        name: Name of the token; tokens of a CONFIG.yaml have the prefix ``config:``.
        runs: Runs that clients with this token may access; null is all.
        uses_left: Number of clients that can still enrol with the token; null is unlimited.
        expires_at: Expiry, seconds since the epoch; null is never.
    """

    name: str
    runs: tuple[str, ...] | None = None
    uses_left: int | None = None
    expires_at: float | None = None
    created_at: float
    revoked_at: float | None = None


class CreatedToken(TokenInfo):
    """A new enrolment token with its secret `token`, which cannot be read again."""

    token: Annotated[str, Field(repr=False)]


class TokenList(Message):
    """``GET /v1/enrolment-tokens``: the tokens in order of creation."""

    tokens: tuple[TokenInfo, ...]


class ClientInfo(Message):
    """An enrolled client, without its secrets.

    Attributes:
        token: Name of the token that the client enrolled with.
        runs: Runs that the client may access; null is all.
        seen_at: Time of the client's last request, with a precision of a day.
    """

    client_id: Id
    name: Name | None = None
    token: str | None = None
    runs: tuple[str, ...] | None = None
    enrolled_at: float
    revoked_at: float | None = None
    seen_at: float | None = None


class ClientList(Message):
    """``GET /v1/clients``: clients in order of enrolment.

    Attributes:
        next: Value of the parameter ``after`` for the next page; null on the last page.
    """

    clients: tuple[ClientInfo, ...]
    next: int | None = None
