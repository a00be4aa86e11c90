"""Enrolment: a token becomes a client identity."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fedone_sdk.messages.base import Id, Message, Name

__all__ = ["Enrol", "Enrolled", "Rotated"]

Nonce = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{22,128}$")]
PublicKey = Annotated[str, Field(pattern=r"^[A-Za-z0-9+/]{43}=$")]


class Enrol(Message):
    """``POST /v1/clients``, authorised by an enrolment token.

    Attributes:
        name: What people may call the device.
        nonce: A secret of at least 16 random bytes that the device makes once, base64url. Asked
            again with it, the answer is the same client with a new credential, so that a lost
            answer costs nothing.
        public_key: Raw Ed25519 public key, base64; from then on the device must sign its requests.
    """

    name: Name | None = None
    nonce: Annotated[Nonce | None, Field(repr=False)] = None
    public_key: PublicKey | None = None


class Enrolled(Message):
    """The new identity.

    Attributes:
        client_id: Public name of the client.
        credential: Its secret, sent as a bearer token from now on.
    """

    client_id: Id
    credential: Annotated[str, Field(repr=False)]


class Rotated(Message):
    """A new credential, ``POST /v1/clients/me/credential``.

    The one before stays valid until this one is used.

    Attributes:
        credential: The secret, sent as a bearer token from now on.
    """

    credential: Annotated[str, Field(repr=False)]
