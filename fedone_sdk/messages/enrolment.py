"""Enrolment: a token becomes a client identity."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fedone_sdk.messages.base import Id, Message, Name

__all__ = ["Enrol", "Enrolled"]


class Enrol(Message):
    """``POST /v1/clients``, authorised by an enrolment token.

    Attributes:
        name: What people may call the device.
    """

    name: Name | None = None


class Enrolled(Message):
    """The new identity.

    Attributes:
        client_id: Public name of the client.
        credential: Its secret, sent as a bearer token from now on.
    """

    client_id: Id
    credential: Annotated[str, Field(repr=False)]
