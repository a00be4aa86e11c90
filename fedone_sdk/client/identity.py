"""A device's identity at one server."""

from __future__ import annotations

import secrets

import structlog

from fedone_sdk.client.device_state import DeviceState, change
from fedone_sdk.messages import Enrolled, is_sendable

_log = structlog.get_logger(__name__)


class Identity:
    """Credential and enrolment nonce, kept across restarts.

    A damaged one is ignored, and the device enrols again.

    Attributes:
        client_id: The device's public name; None until it has enrolled.
        credential: Its secret; None until it has enrolled.
    """

    def __init__(self, state: DeviceState) -> None:
        self._state = state
        self.server = state.server
        self._nonce: str | None = None
        self.client_id: str | None = None
        self.credential: str | None = None
        query = "SELECT client_id, credential, nonce FROM identity WHERE server = :server"
        for client_id, credential, nonce in state.read(query):
            if credential is not None and not is_sendable(credential):
                _log.warning("damaged identity ignored")
                continue
            self.client_id, self.credential, self._nonce = client_id, credential, nonce

    def __repr__(self) -> str:
        return f"Identity(server={self.server!r}, client_id={self.client_id!r})"

    def _save(self) -> None:
        self._state.write(
            change(
                "INSERT OR REPLACE INTO identity VALUES (:server, :client_id, :credential, :nonce)",
                client_id=self.client_id,
                credential=self.credential,
                nonce=self._nonce,
            )
        )

    def nonce(self) -> str:
        """Return the nonce to enrol with, which is written before it is used.

        An enrolment that is repeated with the same nonce returns the same client.
        """
        if self._nonce is None:
            self._nonce = secrets.token_urlsafe(32)
            self._save()
        return self._nonce

    def begin(self, nonce: str) -> None:
        """Set the nonce, unless there is one or an identity."""
        if self._nonce is None and self.credential is None:
            self._nonce = nonce
            self._save()

    def enrolled(self, message: Enrolled) -> None:
        """Store a new identity."""
        self.client_id, self._nonce = message.client_id, None
        self.renew(message.credential)

    def renew(self, credential: str) -> None:
        """Store another credential of the same client, before it is used."""
        self.credential = credential
        self._save()

    def forget(self) -> None:
        """Delete an identity that the server no longer accepts."""
        self.client_id = self.credential = self._nonce = None
        self._save()
