"""A device's identity at one server."""

from __future__ import annotations

import base64
import secrets

import structlog

from fedone_sdk.client.device_state import DeviceState, change
from fedone_sdk.messages import Enrolled, is_sendable

_log = structlog.get_logger(__name__)


class Identity:
    """Credential, enrolment nonce and signing key, kept across restarts.

    A damaged one is ignored, and the device enrols again.

    Attributes:
        client_id: The device's public name; None until it has enrolled.
        credential: Its secret; None until it has enrolled.
        private_key: Signs its requests; None if it does not sign.
    """

    def __init__(self, state: DeviceState) -> None:
        self._state = state
        self.server = state.server
        self._nonce: str | None = None
        self.client_id: str | None = None
        self.credential: str | None = None
        self.private_key: str | None = None
        query = (
            "SELECT client_id, credential, nonce, private_key FROM identity WHERE server = :server"
        )
        for found in state.read(query):
            self._load(*found)

    def __repr__(self) -> str:
        return f"Identity(server={self.server!r}, client_id={self.client_id!r})"

    def _load(
        self,
        client_id: str | None,
        credential: str | None,
        nonce: str | None,
        private_key: str | None,
    ) -> None:
        try:
            check_secrets(credential, private_key)
        except (ValueError, TypeError) as exc:
            _log.warning("damaged identity ignored", error=type(exc).__name__)
            return
        self.client_id, self.credential = client_id, credential
        self._nonce, self.private_key = nonce, private_key

    def _save(self) -> None:
        self._state.write(
            change(
                "INSERT OR REPLACE INTO identity VALUES "
                "(:server, :client_id, :credential, :nonce, :private_key)",
                client_id=self.client_id,
                credential=self.credential,
                nonce=self._nonce,
                private_key=self.private_key,
            )
        )

    def nonce(self, private_key: str | None) -> str:
        """Return the nonce to enrol with, which is written before it is used.

        An enrolment that is repeated with the same nonce returns the same client. Another signing
        key needs another nonce.
        """
        if self._nonce is None or self.private_key != private_key:
            self._nonce = secrets.token_urlsafe(32)
            self.private_key = private_key
            self._save()
        return self._nonce

    def begin(self, nonce: str) -> None:
        """Set the nonce of a client that does not sign, unless there is one or an identity."""
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
        self.client_id = self.credential = self.private_key = self._nonce = None
        self._save()


def check_secrets(credential: str | None, private_key: str | None) -> None:
    """Check a stored credential and a stored signing key.

    Raises:
        ValueError: One of them cannot be used.
    """
    if credential is not None and not is_sendable(credential):
        raise ValueError("not a credential")
    if private_key is not None and len(base64.b64decode(private_key, validate=True)) != 32:
        raise ValueError("not a key")
