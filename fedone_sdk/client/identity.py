"""A device's identity at one server."""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
from pathlib import Path

import structlog

from fedone_sdk.client.state_dir import StateDir
from fedone_sdk.messages import Enrolled, is_sendable

_log = structlog.get_logger(__name__)

_FILE = "identity.json"


def server_state(state_dir: str | Path | None, server: str) -> StateDir:
    """Return a device's state for one server."""
    if state_dir is None:
        return StateDir(None)
    return StateDir(Path(state_dir) / hashlib.sha256(server.encode()).hexdigest()[:16])


class Identity:
    """Credential, enrolment nonce and signing key, kept across restarts.

    A damaged file is renamed, and the device enrols again.

    Args:
        state: Keeps it.
        server: The server's URL or name; written to the file for people.

    Attributes:
        server: As given.
        client_id: The device's public name; None until it has enrolled.
        credential: Its secret; None until it has enrolled.
        private_key: Signs its requests; None if it does not sign.
    """

    def __init__(self, state: StateDir, server: str) -> None:
        self._state = state
        self.server = server
        self._nonce: str | None = None
        self.client_id: str | None = None
        self.credential: str | None = None
        self.private_key: str | None = None
        content = state.read(_FILE)
        if content is not None:
            self._load(content)

    def __repr__(self) -> str:
        return f"Identity(server={self.server!r}, client_id={self.client_id!r})"

    def _load(self, content: bytes) -> None:
        try:
            kept = json.loads(content)
            found = [kept[name] for name in ("client_id", "credential", "nonce", "private_key")]
            if not all(value is None or isinstance(value, str) for value in found):
                raise TypeError("not text")
            if found[1] is not None and not is_sendable(found[1]):
                raise ValueError("not a credential")
            if found[3] is not None and len(base64.b64decode(found[3], validate=True)) != 32:
                raise ValueError("not a key")
        except (ValueError, TypeError, KeyError, RecursionError) as exc:
            _log.warning("damaged identity renamed", file=_FILE, error=type(exc).__name__)
            self._state.write(f"{_FILE}.damaged", content)
            self._state.remove(_FILE)
            return
        self.client_id, self.credential, self._nonce, self.private_key = found

    def _save(self) -> None:
        document = {
            "server": self.server,
            "client_id": self.client_id,
            "credential": self.credential,
            "nonce": self._nonce,
            "private_key": self.private_key,
        }
        self._state.write(_FILE, json.dumps(document).encode())

    def nonce(self, private_key: str | None) -> str:
        """Return the nonce to enrol with, which is written before it is used.

        An enrolment that is repeated with the same nonce returns the same client.

        Args:
            private_key: The signing key of the client that enrols; None if it does not sign.
        """
        if self._nonce is None or self.private_key != private_key:
            self._nonce = secrets.token_urlsafe(32)
            self.private_key = private_key
            self._save()
        return self._nonce

    def begin(self, nonce: str) -> None:
        """Set the nonce to enrol with, unless there is one or an identity.

        Args:
            nonce: For a client that does not sign its requests.
        """
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
