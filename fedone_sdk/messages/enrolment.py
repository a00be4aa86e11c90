"""Enrolment of clients and rotation of credentials."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fedone_sdk.messages.base import Id, Message, Name

Nonce = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{22,128}$")]
PublicKey = Annotated[str, Field(pattern=r"^[A-Za-z0-9+/]{43}=$")]


class Enrol(Message):
    """``POST /v1/clients``, authorised by an enrolment token.

    Attributes:
        name: Display name of the device.
        nonce: A secret of at least 16 random bytes that the device generates once, base64url. A
            repeated request with the same nonce returns the same client with a new credential.
        public_key: Raw Ed25519 public key, base64; the device must then sign its requests.
    """

    name: Name | None = None
    nonce: Annotated[Nonce | None, Field(repr=False)] = None
    public_key: PublicKey | None = None


class Enrolled(Message):
    """The new identity.

    Attributes:
        client_id: Public id of the client.
        credential: Its secret, sent as a bearer token from now on.
    """

    client_id: Id
    credential: Annotated[str, Field(repr=False)]


class Rotated(Message):
    """A new credential, ``POST /v1/clients/me/credential``.

    The previous one stays valid until this one is used.

    Attributes:
        credential: The secret, sent as a bearer token from now on.
    """

    credential: Annotated[str, Field(repr=False)]
